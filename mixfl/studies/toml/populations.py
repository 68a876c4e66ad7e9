"""Problems from the paper's conclusion, on synthetic faces. Some clients have only smiling faces,
the others only unsmiling ones: as two populations without a central term, or as one."""

from functools import partial

import numpy as np

from mixfl.data.examples import ClientData
from mixfl.problem import Federated, Problem
from mixfl.tasks import smile

SETTINGS = dict(
    cohort_size=25, client_batch=10, local_steps=4, client_lr=0.02, rounds=200, eval_every=10
)


def _data():
    train, held_out = smile._divided(smile.Options(image_size=28, clients=200, per_client=30), None)
    parts = [train.where(lambda c, y=y: c["smiling"] == y, "smiling").usable() for y in (1, 0)]
    mean, scale = smile._statistics(parts[0], parts[1].examples, "standardized")
    size = int(np.prod(train.examples.columns["image"].shape))
    return (
        dict(
            init=partial(smile.init, inputs=size, hidden=64),
            evaluate=smile.Evaluation(held_out.examples, mean, scale),
        ),
        parts,
        partial(smile.image_loss, mean=mean, scale=scale),
    )


def two():
    """Two populations, each with its own cohort in every round."""
    common, parts, loss = _data()
    terms = [
        Federated(loss, part, weight=0.5, name=name)
        for name, part in zip(("smiling", "unsmiling"), parts, strict=True)
    ]
    return Problem(terms=terms, settings=SETTINGS, name="two", **common)


def one():
    """The same clients as one population, with a cohort of the same total size."""
    common, parts, loss = _data()
    columns = [part.examples.all() for part in parts]
    owners = [np.repeat(np.arange(len(part)), part.sizes()) for part in parts]
    owners[1] = owners[1] + len(parts[0])
    data = {k: np.concatenate([c[k] for c in columns]) for k in columns[0]}
    clients = ClientData.from_arrays(data, client=np.concatenate(owners))
    settings = SETTINGS | {"cohort_size": 2 * SETTINGS["cohort_size"]}
    return Problem(terms=[Federated(loss, clients)], settings=settings, name="one", **common)
