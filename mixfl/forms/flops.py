"""Counts the flops of a gradient's products, 2 per multiply-add, from its jaxpr.

A convolution counts without what it multiplies by its padding and its dilation.
"""

import math

import jax
import numpy as np
from jax.extend.core import jaxprs_in_params


def of_gradient(loss, params, batch) -> float:
    """Flops of the products of the gradient of the mean loss over a batch. Products that only raw
    data's gradient would need are not in it. The arguments may be shapes."""
    grad = jax.grad(lambda x, data: loss(x, data).mean())
    return _of(jax.make_jaxpr(grad)(params, batch).jaxpr)


def _of(jaxpr) -> float:
    return sum(_of_equation(e) for e in jaxpr.eqns)


def _of_equation(e) -> float:
    if e.primitive.name == "dot_general":
        (contracted, _), _ = e.params["dimension_numbers"]
        left = e.invars[0].aval.shape
        return 2 * math.prod(e.outvars[0].aval.shape) * math.prod(left[d] for d in contracted)
    if e.primitive.name == "conv_general_dilated":
        return _of_convolution(e)
    if e.primitive.name == "while" and _of(e.params["body_jaxpr"].jaxpr):
        raise ValueError("products in a while loop: its steps can't be counted")
    if e.primitive.name == "cond":
        return max(_of(b.jaxpr) for b in e.params["branches"])
    times = e.params["length"] if e.primitive.name == "scan" else 1
    return times * sum(_of(j) for j in jaxprs_in_params(e.params))


def _of_convolution(e) -> float:
    p, (x, w), (y,) = e.params, (v.aval.shape for v in e.invars), (v.aval.shape for v in e.outvars)
    numbers = p["dimension_numbers"]
    specs = (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec)
    taps = 1
    for i, (low, _) in enumerate(p["padding"]):
        n, k, out = (a[spec[2 + i]] for a, spec in zip((x, w, y), specs, strict=True))
        place = np.arange(out)[:, None] * p["window_strides"][i] - low
        place = place + np.arange(k) * p["rhs_dilation"][i]
        dilation = p["lhs_dilation"][i]
        inside = (place >= 0) & (place <= (n - 1) * dilation) & (place % dilation == 0)
        taps *= int(inside.sum())
    batch, outputs = (y[d] for d in numbers.out_spec[:2])
    return 2 * batch * outputs * w[numbers.rhs_spec[1]] * taps / p["batch_group_count"]
