"""`download = bf16 | int16 | int8`: what clients get, in fewer bytes.

    m'  = Q(m + e)           what clients get and train with: the decoded message
    e'  = m + e - m'         error feedback: the server adds what was lost to the next message

m is the model x (`download`) or the augmenting gradient (`download_gradient`), each by itself. Q
rounds to the nearest bfloat16 number, or to codes of a rotated array (codes.py) whose range is its
own largest number. Clients keep nothing, so it is the message that is coded, and not a change.

The server's own x stays exact. Clients train from x' and send Delta_i, a change: x moves to
x + Delta, whatever x' was. Likewise a client takes the m' that it got out of its own part, and the
server puts the same m' back: no gradient that 2-way keeps has the error of a message in it.
A model's state (such as running means of a BatchNorm) is sent as it is, because a variance that was
rounded to 0 would be worse than a few bytes. So are an algorithm's own fields.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from mixfl.aggregation import codes
from mixfl.algorithms.contract import Broadcast
from mixfl.errors import MixflError
from mixfl.settings import Settings
from mixfl.trees import Model, params_of

BITS = {"int8": 8, "int16": 16}
KEY = (0x6D697866, 0x6C000000)  # of the rotation: there is no chance in it, so always the same


class Coded(NamedTuple):
    codes: Any  # of each array
    ranges: Any  # [arrays]


class Errors(NamedTuple):
    """What the messages so far have lost; () where nothing is."""

    x: Any
    aug: Any


class Down(NamedTuple):
    """A round's messages."""

    broadcasts: list[Broadcast]  # decoded
    codes: list[Broadcast]  # as they are sent
    errors: tuple  # per population


class Download:
    def __init__(self, s: Settings):
        self.x = _kind(s.download)
        self.aug = self.x if s.download_gradient == "auto" else _kind(s.download_gradient)

    @property
    def exact(self) -> bool:
        return self.x == self.aug == "float32"

    def init(self, x: Any, populations: int) -> tuple:
        """The state before the first round."""
        if self.exact:
            return ()

        def zeros(kind):
            return () if kind == "float32" else jax.tree.map(jnp.zeros_like, params_of(x))

        return tuple(Errors(zeros(self.x), zeros(self.aug)) for _ in range(populations))

    def sent(self, errors: tuple, broadcasts: list[Broadcast]) -> Down:
        if self.exact or not broadcasts:
            return Down(broadcasts, broadcasts, errors)
        each = [self._one(e, b) for e, b in zip(errors, broadcasts, strict=True)]
        decoded, coded, after = (list(column) for column in zip(*each, strict=True))
        return Down(decoded, coded, tuple(after))

    def _one(self, errors: Errors, b: Broadcast) -> tuple[Broadcast, Broadcast, Errors]:
        if not isinstance(b, Broadcast):
            raise MixflError(
                "download: this algorithm sends messages of its own making, which are not coded. "
                "Use download = float32."
            )
        x, x_codes, x_error = _sent(self.x, b.x, errors.x)
        if b.aug is None:
            return b._replace(x=x), b._replace(x=x_codes), errors._replace(x=x_error)
        aug, aug_codes, aug_error = _sent(self.aug, b.aug, errors.aug)
        return (
            b._replace(x=x, aug=aug),
            b._replace(x=x_codes, aug=aug_codes),
            Errors(x_error, aug_error),
        )

    def decoded(self, b: Broadcast) -> Broadcast:
        """What a client makes of the codes."""
        aug = None if b.aug is None else restored(self.aug, b.aug)
        return b._replace(x=restored(self.x, b.x), aug=aug)


def coded(kind: str, tree: Any) -> Any:
    """The codes of an array or a model."""
    if kind == "float32":
        return tree
    if isinstance(tree, Model):
        return Model(coded(kind, tree.params), tree.state)
    if kind == "bfloat16":
        return jax.tree.map(lambda a: a.astype(jnp.bfloat16), tree)
    most, signs, ranges = codes.largest(BITS[kind]), codes.signs(_key()), []

    def one(a):
        y = codes.rotated(a, signs)
        ranges.append(jnp.max(jnp.abs(y), initial=0))
        unit = jnp.where(ranges[-1] > 0, ranges[-1] / most, 1.0)
        return jnp.clip(jnp.round(y / unit), -most, most).astype(f"int{BITS[kind]}")

    made = jax.tree.map(one, tree)
    return Coded(made, jnp.stack(ranges).astype(jnp.float32))


def restored(kind: str, given: Any) -> Any:
    """From codes, also of some rows of tables."""
    if kind == "float32":
        return given
    if isinstance(given, Model):
        return Model(restored(kind, given.params), given.state)
    if kind == "bfloat16":
        return jax.tree.map(lambda a: jnp.asarray(a).astype(jnp.float32), given)
    most, signs = codes.largest(BITS[kind]), codes.signs(_key())
    leaves, tree = jax.tree.flatten(given.codes)
    steps = given.ranges / most
    return jax.tree.unflatten(tree, [
        codes.restored(jnp.asarray(a).astype(jnp.float32), signs) * steps[i]
        for i, a in enumerate(leaves)
    ])  # fmt: skip


def _sent(kind: str, tree: Any, error: Any) -> tuple[Any, Any, Any]:
    """What clients make of it, its codes, and what is lost."""
    if kind == "float32":
        return tree, tree, error
    wanted = jax.tree.map(lambda a, e: a + e, params_of(tree), error)
    whole = Model(wanted, tree.state) if isinstance(tree, Model) else wanted
    made = coded(kind, whole)
    got = jax.tree.map(lambda a, like: a.astype(like.dtype), restored(kind, made), tree)
    lost = jax.tree.map(lambda a, b: a - b, wanted, params_of(got))
    return got, made, lost


def _kind(name: str) -> str:
    return "bfloat16" if name == "bf16" else name


def _key():
    return jnp.array(KEY, jnp.uint32)
