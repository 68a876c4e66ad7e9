"""The state of a model: running statistics and the like, which losses compute and nobody trains.

    loss(params, batch, state)  ->  losses, the next state

In such a problem the model is a trees.Model: the parameters with the state. A step of an optimizer
moves the parameters along their gradient. What stands in the gradient's place for the state is the
old state minus the next one, and every step takes it in full. So the state goes through algorithms,
aggregation, checkpoints and messages as parameters do, and is merged as the clients' changes are:
by their weighted mean. (JAX is imported when it is needed: making a problem must be possible
without it.)
"""

from collections.abc import Callable, Sequence
from typing import Any

from mixfl.errors import MixflError
from mixfl.frozen import Frozen, with_frozen
from mixfl.losses import Takes, takes

MASK = "mask"  # the column that says which rows of a batch are not padding


class StateLoss:
    """A loss of the parameters, as a loss of the model. If `carries`, it returns (losses, the next
    state), and its batch has the column `mask`."""

    def __init__(self, loss: Callable):
        self.loss = loss
        self.carries = takes(loss).state

    @property
    def takes(self) -> Takes:
        return takes(self.loss)._replace(state=False)

    @property
    def frozen(self) -> Any:
        return getattr(self.loss, "frozen", None)

    def with_frozen(self, arrays: Any) -> "StateLoss":
        return StateLoss(self.loss.with_frozen(arrays))  # type: ignore[attr-defined]

    def rebound(self, frozen: Frozen) -> "StateLoss":
        """With the frozen arrays of another problem."""
        return StateLoss(with_frozen(self.loss, frozen))

    def __call__(self, x, *batch):
        import jax

        if not self.carries:
            return self.loss(x.params, *batch)
        if batch and MASK not in batch[0]:
            rows = len(next(iter(batch[0].values())))
            batch = ({**batch[0], MASK: jax.numpy.ones(rows)},)
        result = self.loss(x.params, *batch, state=jax.lax.stop_gradient(x.state))
        if not isinstance(result, tuple) or len(result) != 2:
            raise MixflError(
                "a loss with a parameter `state` must return (losses, the next state), got a "
                f"{type(result).__name__}."
            )
        losses, state = result
        _check_alike(x.state, state)
        return losses, jax.tree.map(lambda new, old: new.astype(old.dtype), state, x.state)


def _check_alike(before: Any, after: Any) -> None:
    import jax

    shapes = [
        (jax.tree.structure(t), [jax.numpy.shape(a) for a in jax.tree.leaves(t)])
        for t in (before, after)
    ]
    if shapes[0] != shapes[1]:
        raise MixflError(
            f"a loss returned a state like {shapes[1]}: it must be like the one it was given, "
            f"{shapes[0]}."
        )


class WithInitial:
    """init(key) with the initial state."""

    def __init__(self, init: Callable, state: Any):
        self.init, self.state = init, state

    def __call__(self, key):
        import jax

        from mixfl.trees import Model

        params = self.init(key)
        if isinstance(params, Model):
            return params
        return Model(params, jax.tree.map(jax.numpy.asarray, self.state))


def with_initial(init: Callable, state: Any) -> Callable:
    if isinstance(init, WithInitial):
        return init if init.state is state else WithInitial(init.init, state)
    return WithInitial(init, state)


def carries_state(loss: Any) -> bool:
    return getattr(loss, "carries", False)


def with_state(terms: Sequence[Any], losses: Sequence[Callable], given: bool) -> list[Callable]:
    """The terms' losses, in a problem with or without a state."""
    for term, loss in zip(terms, losses, strict=True):
        name = f"the loss of term '{term.name}'"
        if not given and takes(loss).state:
            raise MixflError(f"{name} has a parameter `state`: give Problem(..., state=...).")
        if given and hasattr(loss, "of_term"):
            raise MixflError(
                f"{name} is written in PyTorch: only losses in JAX can be in a problem with a "
                "state."
            )
        if given and getattr(term, "rows", None):
            raise MixflError(f"the term '{term.name}' has rows=..., which a state rules out.")
        if given and takes(loss).state and getattr(term, "data", term) is None:
            raise MixflError(f"{name} has no data, and so no state to carry: leave out `state`.")
    if not given:
        return list(losses)
    own_way = [hasattr(a, "carries") or hasattr(a, "gradient_in_form") for a in losses]
    wrapped = [
        loss if known else StateLoss(loss) for loss, known in zip(losses, own_way, strict=True)
    ]
    if not any(map(carries_state, wrapped)) and not all(own_way):
        raise MixflError(
            "state: no loss has a parameter of this name, as loss(params, batch, state)."
        )
    return wrapped


# The algorithms that merge the terms' states as docs/models.md says.
KNOWN = ("fedavg", "pt", "1wgt", "2wgt", "central", "pretrain", "oracle", "baseline")


def check_known(algorithm: str, problem: Any, settings: Any) -> None:
    if problem.state is None:
        return
    if getattr(settings, "private", False):
        raise MixflError(
            "the state of a model with differential privacy: it is made of clients' inputs, and "
            "noise that hides them would drown it. Use layer or group norm."
        )
    if algorithm not in KNOWN:
        raise MixflError(
            f"'{algorithm}' does not say how it merges the state of a model: use one of "
            f"{', '.join(KNOWN)}."
        )
