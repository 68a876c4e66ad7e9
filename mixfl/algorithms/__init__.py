"""The algorithms, one file each. `ALGORITHMS` has them by the name used on the command line."""

from mixfl.algorithms.baseline import baseline
from mixfl.algorithms.central import central
from mixfl.algorithms.contract import Recipe
from mixfl.algorithms.example_transfer import example_transfer
from mixfl.algorithms.fed_avg import fed_avg
from mixfl.algorithms.finding import found
from mixfl.algorithms.one_way_gt import one_way_gt
from mixfl.algorithms.oracle import oracle
from mixfl.algorithms.parallel_training import parallel_training
from mixfl.algorithms.pretrain import pretrain
from mixfl.algorithms.two_way_gt import two_way_gt

ALGORITHMS: dict[str, Recipe] = {
    recipe.id: recipe
    for recipe in (
        fed_avg, parallel_training, one_way_gt, two_way_gt, example_transfer,
        oracle, central, pretrain, baseline,
    )
}  # fmt: skip


def recipe(given: str | Recipe) -> Recipe:
    """By its id, as `path.py:name`, or itself (finding.py)."""
    return found(given, ALGORITHMS)
