"""What a workload consists of, in numbers."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Size:
    """The size of a workload. `model` has the numbers that the model needs."""

    task: str
    S: int
    K: int
    B: int
    lr: float
    weight: float  # of the federated term
    clients: int
    per_client: int
    central: int  # examples at the server
    model: dict[str, Any]
