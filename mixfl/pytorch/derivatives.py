"""Operators with PyTorch's derivatives where a function bends, ends or overflows.

At such points PyTorch has rules of its own: the slope of |x| at 0 is 0, that of a norm too. torchax
takes what JAX derives from a formula, which there may be another slope or NaN (of softplus beyond
88, of a logarithm of 0). Most models come to such a point sooner or later: layers that start at 0,
padding, an output that is certain. Here the formulas are written so that JAX derives PyTorch's
slopes, of any order.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from mixfl.pytorch import operators

aten = torch.ops.aten
LOWEST = -100.0  # of the logarithms in binary_cross_entropy
SMALLEST = 1e-12  # of p (1 - p) in its derivative
MANY_ROWS = 25


def magnitude(x):
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.abs(x)
    return x * jnp.sign(x)


def root(x):
    """sqrt, with the slope 0 at 0, as norms and deviations have it."""
    return jnp.where(x == 0, 0, jnp.sqrt(jnp.where(x == 0, 1, x)))


def clamp(x, min=None, max=None):
    """A limit that is just reached does not stop the gradient."""
    if min is not None:
        x = jnp.where(x < min, min, x)
    return x if max is None else jnp.where(x > max, max, x)


def clamp_max(x, max):
    return clamp(x, None, max)


def hardtanh(x, min_val=-1, max_val=1):
    """Here it does."""
    low, high = (jnp.asarray(v, x.dtype) for v in (min_val, max_val))
    return jnp.where(x <= low, low, jnp.where(x >= high, high, x))


def hardsigmoid(x):
    return hardtanh(x / 6 + 0.5, 0, 1)


def hardswish(x):
    return jnp.where(x <= -3, 0, jnp.where(x >= 3, x, x * (x + 3) / 6))


def leaky_relu(x, negative_slope=0.01):
    return jnp.where(x > 0, x, negative_slope * x)


def elu(x, alpha=1, scale=1, input_scale=1):
    below = jnp.where(x > 0, 0, x)  # no infinities on the side that is not taken
    return jnp.where(x > 0, scale * x, alpha * scale * jnp.expm1(input_scale * below))


def celu(x, alpha=1):
    return elu(x, alpha, 1, 1 / alpha)


def softplus(x, beta=1, threshold=20):
    linear = beta * x > threshold
    return jnp.where(linear, x, jnp.log1p(jnp.exp(jnp.where(linear, 0, beta * x))) / beta)


def mish(x):
    return x * jnp.tanh(softplus(x))


def log_sigmoid(x):
    """And a buffer that only PyTorch's derivative uses."""
    return jax.nn.log_sigmoid(x), jnp.zeros((0,), x.dtype)


def sinc(x):
    angle = jnp.pi * jnp.where(x == 0, 1, x)
    return jnp.where(x == 0, 1, jnp.sin(angle) / angle)


@jax.custom_jvp
def _cross_entropy(p, target):
    return -(target * _log(p) + (1 - target) * _log(1 - p))


def _log(p):
    return jnp.maximum(jnp.log(p), LOWEST)


@_cross_entropy.defjvp
def _cross_entropy_slope(at, along):
    (p, target), (dp, dtarget) = at, along
    slope = (p - target) / jnp.maximum(p * (1 - p), SMALLEST)
    return _cross_entropy(p, target), slope * dp + (_log(1 - p) - _log(p)) * dtarget


def binary_cross_entropy(p, target, weight=None, reduction=1):
    losses = _cross_entropy(p, jnp.asarray(target, p.dtype))
    losses = losses if weight is None else weight * losses
    return (lambda a: a, jnp.mean, jnp.sum)[reduction](losses)


def vector_norm(x, ord=2, dim=None, keepdim=False, dtype=None):
    x = x if dtype is None else x.astype(_dtype(dtype))
    axis, size = _axes(dim), magnitude(x)
    if ord == 0:
        return jnp.sum(x != 0, axis=axis, keepdims=keepdim).astype(size.dtype)
    if abs(ord) == float("inf"):
        return (jnp.max if ord > 0 else jnp.min)(size, axis=axis, keepdims=keepdim)
    if ord == 1:
        return jnp.sum(size, axis=axis, keepdims=keepdim)
    if ord == 2:
        return root(jnp.sum(jnp.square(size), axis=axis, keepdims=keepdim))
    total = jnp.sum(size**ord, axis=axis, keepdims=keepdim)
    return jnp.where(total == 0, 0, jnp.where(total == 0, 1, total) ** (1 / ord))


def dist(x, y, p=2):
    return vector_norm(x - y, p)


def cdist(x1, x2, p=2.0, compute_mode=None):
    """Between all rows of x1 and of x2; of many rows by a product, as PyTorch does."""
    if p != 2 or max(x1.shape[-2], x2.shape[-2]) <= MANY_ROWS:
        return vector_norm(x1[..., :, None, :] - x2[..., None, :, :], p, -1)
    squares = [jnp.sum(jnp.square(a), -1) for a in (x1, x2)]
    both = x1 @ jnp.swapaxes(x2, -1, -2)
    return root(jnp.maximum(squares[0][..., :, None] + squares[1][..., None, :] - 2 * both, 0))


def std(x, dim=None, *, correction=None, keepdim=False):
    correction = 1 if correction is None else correction
    return root(jnp.var(x, axis=_axes(dim), ddof=correction, keepdims=keepdim))


def std_mean(x, dim=None, *, correction=None, keepdim=False):
    mean = jnp.mean(x, axis=_axes(dim), keepdims=keepdim)
    return std(x, dim, correction=correction, keepdim=keepdim), mean


def _of_one(argument: Callable) -> Callable:
    """max or min along an axis: of equal numbers, one has the slope."""

    def along(x, dim, keepdim=False):
        if x.ndim == 0:
            return x, jnp.zeros((), int)
        at = argument(x, axis=dim, keepdims=True)
        places = jax.lax.broadcasted_iota(at.dtype, x.shape, dim % x.ndim)
        value = jnp.sum(jnp.where(places == at, x, 0), axis=dim, keepdims=keepdim, dtype=x.dtype)
        return value, at if keepdim else jnp.squeeze(at, dim)

    return along


def attention(query, key, value, attn_mask=None, *args, **kwargs):
    """Of a query that may see nothing, the result is 0. In PyTorch's operators."""
    from torchax.ops.jtorch import _sdpa_reference

    if attn_mask is None:
        return _sdpa_reference(query, key, value, None, *args, **kwargs)
    some = attn_mask if attn_mask.dtype == torch.bool else attn_mask > -torch.inf
    some = some.any(-1, keepdim=True)
    if attn_mask.dtype == torch.bool:
        attn_mask = attn_mask | ~some
    else:
        attn_mask = torch.where(some, attn_mask, 0.0)
    found = _sdpa_reference(query, key, value, attn_mask, *args, **kwargs)
    return torch.where(some, found, 0.0)


def _axes(dim) -> Any:
    return None if dim is None or dim == [] else tuple(dim) if isinstance(dim, list) else dim


def _dtype(dtype) -> Any:
    from torchax.ops.mappings import t2j_dtype

    return t2j_dtype(dtype)


OPERATORS: dict[Any, Callable] = {
    aten.abs: magnitude,
    aten.clamp.default: clamp,
    aten.clamp.Tensor: clamp,
    aten.clamp_min: clamp,
    aten.clamp_max: clamp_max,
    aten.hardtanh: hardtanh,
    aten.hardsigmoid: hardsigmoid,
    aten.hardswish: hardswish,
    aten.leaky_relu: leaky_relu,
    aten.elu: elu,
    aten.celu: celu,
    aten.softplus: softplus,
    aten.mish: mish,
    aten.log_sigmoid_forward: log_sigmoid,
    aten.sinc: sinc,
    aten.binary_cross_entropy: binary_cross_entropy,
    aten.linalg_vector_norm: vector_norm,
    aten.dist: dist,
    torch.cdist: cdist,
    aten.std.correction: std,
    aten.std_mean.correction: std_mean,
    aten.max.dim: _of_one(jnp.argmax),
    aten.min.dim: _of_one(jnp.argmin),
}
COMPOSED: dict[Any, Callable] = {
    torch.nn.functional.scaled_dot_product_attention: attention,
    aten.scaled_dot_product_attention: attention,
}
IN_PLACE = {
    aten.abs_: aten.abs,
    aten.clamp_max_: aten.clamp_max,
    aten.hardtanh_: aten.hardtanh,
    aten.hardsigmoid_: aten.hardsigmoid,
    aten.hardswish_: aten.hardswish,
    aten.leaky_relu_: aten.leaky_relu,
    aten.elu_: aten.elu,
    aten.celu_: aten.celu,
    aten.mish_: aten.mish,
}


def register(environment: Any) -> None:
    """These take the place of torchax's own in an environment of torchax."""
    from torchax.ops.op_base import InplaceOp
    from torchax.ops.ops_registry import Operator

    def put(operator, function, jax_function: bool, view: bool = False) -> None:
        made = Operator(operator, function, jax_function, True, False, view)
        for each in (operator, getattr(operator, "default", operator)):
            environment._ops[each] = made

    for operator, function in {**operators.OPERATORS, **OPERATORS}.items():
        put(operator, function, True)
    for operator, function in COMPOSED.items():
        put(operator, function, False)
    for operator, functional in IN_PLACE.items():
        put(operator, InplaceOp(functional), False, view=True)
