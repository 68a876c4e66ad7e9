"""A loop over padded arrays that ends where the padding begins."""

import jax
import jax.numpy as jnp


def scan_first(n, step, carry, xs, idle=None):
    """`jax.lax.scan` over only the first n of xs, at the cost of n. The outputs of the others are
    `idle`. (n may be traced, so reverse-mode differentiation can't go through this loop.)"""
    count = len(jax.tree.leaves(xs)[0])
    outputs = jax.tree.map(lambda a: jnp.broadcast_to(a, (count, *a.shape)), idle)

    def one(i, carried):
        carry, outputs = carried
        x = jax.tree.map(lambda a: jax.lax.dynamic_index_in_dim(a, i, keepdims=False), xs)
        carry, output = step(carry, x)
        put = lambda all, a: jax.lax.dynamic_update_index_in_dim(all, a, i, 0)  # noqa: E731
        return carry, jax.tree.map(put, outputs, output)

    return jax.lax.fori_loop(0, n, one, (carry, outputs))
