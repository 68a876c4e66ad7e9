"""The algorithms, one file each. `ALGORITHMS` has them by the name used on the command line.

For algorithms of your own (docs/algorithms.md): `algorithm`, `key`, and the contract's names.
"""

from mixfl.algorithms.baseline import baseline
from mixfl.algorithms.central import central
from mixfl.algorithms.contract import (
    AUTO_KEYS,
    BATCH_KEYS,
    CENTRAL_KEYS,
    CLIENT_KEYS,
    MERGE_KEYS,
    Algorithm,
    Broadcast,
    Recipe,
    Sums,
    Upload,
    algorithm,
)
from mixfl.algorithms.example_transfer import example_transfer
from mixfl.algorithms.fed_avg import fed_avg
from mixfl.algorithms.fedclg import fedclg
from mixfl.algorithms.finding import found
from mixfl.algorithms.marks import own_loss_only
from mixfl.algorithms.mime_lite import mime_lite
from mixfl.algorithms.one_way_gt import one_way_gt
from mixfl.algorithms.oracle import oracle
from mixfl.algorithms.parallel_training import parallel_training
from mixfl.algorithms.pretrain import pretrain
from mixfl.algorithms.scaffold import scaffold
from mixfl.algorithms.server_learning import server_learning
from mixfl.algorithms.two_way_gt import two_way_gt
from mixfl.validation import key

__all__ = [
    "ALGORITHMS", "AUTO_KEYS", "BATCH_KEYS", "CENTRAL_KEYS", "CLIENT_KEYS", "MERGE_KEYS",
    "Algorithm", "Broadcast", "Recipe", "Sums", "Upload", "algorithm", "baseline", "central",
    "example_transfer", "fed_avg", "fedclg", "key", "mime_lite", "one_way_gt", "oracle",
    "own_loss_only", "parallel_training", "pretrain", "recipe", "scaffold",
    "server_learning", "two_way_gt",
]  # fmt: skip

ALGORITHMS: dict[str, Recipe] = {
    recipe.id: recipe
    for recipe in (
        fed_avg, parallel_training, one_way_gt, two_way_gt, example_transfer,
        oracle, central, pretrain, baseline, server_learning, fedclg, mime_lite, scaffold,
    )
}  # fmt: skip


def recipe(given: str | Recipe) -> Recipe:
    """By its id, as `path.py:name`, or itself (finding.py)."""
    return found(given, ALGORITHMS)
