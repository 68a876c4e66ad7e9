"""What the tasks' own keys share: types, and data set aside for choosing settings."""

from typing import Annotated

import numpy as np
from msgspec import Meta

from mixfl.data.examples import ClientData
from mixfl.data.split import held_out_clients

Width = Annotated[int, Meta(ge=1, le=65536)]  # of a layer
UpToMillion = Annotated[int, Meta(ge=1, le=10**6)]
UpToBillion = Annotated[int, Meta(ge=1, le=10**9)]
Several = Annotated[int, Meta(ge=2, le=10**6)]
VALIDATION = 0.1  # part of the training clients that is set aside if asked for
CLIENT_EVAL_HELP = "true: also evaluate each held-out client (eval/clients/ metrics)"
VALIDATION_HELP = "true: also evaluate on data set aside for choosing settings (valid/ metrics)"


def set_aside(train: ClientData, seed: int) -> tuple[ClientData, ClientData]:
    """Split the training clients: for training, and for choosing settings."""
    chosen = held_out_clients(len(train), VALIDATION, seed)
    return train.select(np.flatnonzero(~chosen)), train.select(np.flatnonzero(chosen))
