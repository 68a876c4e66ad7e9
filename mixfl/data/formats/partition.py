"""Assigns the records of data without clients to N new clients, while they are read."""

from collections.abc import Iterable, Iterator

import numpy as np

from mixfl.data.formats.base import Record
from mixfl.data.formats.options import Partition
from mixfl.data.partitioning import shares as draw_shares
from mixfl.errors import MixflError

MOST_LABELS = 10_000


def deal(records: Iterable[Record], how: Partition, seed: int) -> Iterator[Record]:
    rng = np.random.default_rng(seed)
    choose = _iid(how, rng) if how.kind == "iid" else _dirichlet(how, rng)
    next(choose)
    for record in records:
        yield record._replace(client=str(choose.send(record)), site="")


def _iid(how: Partition, rng: np.random.Generator):
    """Deals one record to each client in turn, in a new order each time: sizes differ by at most
    one."""
    record = yield -1
    while record:
        for client in rng.permutation(how.clients).tolist():
            record = yield client


def _dirichlet(how: Partition, rng: np.random.Generator):
    """Deals each label to clients in proportions drawn once from Dirichlet(alpha)."""
    shares: dict[str, np.ndarray] = {}
    record = yield -1
    while True:
        if record.label is None:
            raise MixflError(
                "partition dirichlet needs a label for each row: name its column with the option "
                "label, or use iid:CLIENTS."
            )
        if record.label not in shares:
            if len(shares) == MOST_LABELS:
                raise MixflError(
                    f"partition dirichlet found more than {MOST_LABELS:,} labels: name a column of "
                    "classes with the option label, or use iid:CLIENTS."
                )
            shares[record.label] = np.cumsum(draw_shares(rng, how.alpha, how.clients))
        total = shares[record.label]
        at = np.searchsorted(total, rng.random() * total[-1], side="right")
        record = yield int(min(at, how.clients - 1))
