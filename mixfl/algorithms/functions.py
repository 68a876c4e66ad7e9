"""The functions that make up an algorithm (contract.py): what each takes and returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from mixfl.problem import Federated, Params

if TYPE_CHECKING:
    from mixfl.algorithms.contract import Algorithm, ClientFeed, Drawn, Sums, Upload


class HasModel(Protocol):
    @property
    def x(self) -> Params: ...


Info = dict[str, Any]


class Init(Protocol):
    def __call__(self, x: Params, /) -> Any:
        """The state before the first round. It has the model as .x."""


class BroadcastTo(Protocol):
    def __call__(self, state: Any, drawn: Sequence[Drawn | None], /) -> Sequence[Any]:
        """A Broadcast for each population."""


class Client(Protocol):
    def __call__(self, term: Federated, broadcast: Any, feed: ClientFeed, /) -> Upload:
        """A client's Upload."""


class Summand(Protocol):
    def __call__(self, upload: Upload, /) -> Sums:
        """What a client adds to the sums."""


class CentralWork(Protocol):
    def __call__(self, state: Any, drawn: Sequence[Drawn | None], /) -> Any:
        """What the server computes while the clients train, for `update`."""


class Update(Protocol):
    def __call__(
        self, state: Any, broadcasts: Sequence[Any], sums: Sequence[Any], central: Any, /
    ) -> tuple[Any, Info]:
        """The next state. `sums` has the Sums of each population."""


class ClientState(Protocol):
    def __call__(self, x: Params, /) -> Any:
        """The state of a client before its first round: a tree of arrays. x has only the shapes of
        the model: it is 0."""


class Phase(Protocol):
    def __call__(self, round: int, /) -> Algorithm:
        """The algorithm of a round."""
