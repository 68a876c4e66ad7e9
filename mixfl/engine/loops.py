"""Where a round's loops over clients and steps run: in the compiled program, or on the host.

Most operators are as fast inside a compiled loop as outside of one (KNOWN). A few are not, and
nobody has tried all. So if a round has any other operator in its loops, one iteration is timed in
both ways before the run, and the host takes over if the compiled loop clearly loses. The outcome is
kept on disk, by program.
"""

import contextlib
import hashlib
import json
import os
import re
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Jaxpr, jaxpr_as_fun, jaxprs_in_params

from mixfl.algorithms.loops import LOOP
from mixfl.engine.bounded import bounded
from mixfl.engine.dispatch import Dispatched, is_loop
from mixfl.forms.jaxpr import inner_names
from mixfl.process.compilation_cache import programs_folder

CLEARLY = 1.3  # the compiled loop takes so many times as long
SECONDS = 0.5  # of timing, for each way
MOST_KEPT = 1000

# As fast in a loop as outside of one (python -m benchmarks.in_loops), or free.
KNOWN = frozenset(
    name
    for line in (
        "abs add add_any and ceil clamp convert_element_type div eq eq_to floor ge gt integer_pow",
        "is_finite le le_to lt lt_to max min mul ne neg nextafter not or pow rem round",
        "select_n sign square sub xor clz population_count shift_left shift_right_arithmetic",
        "shift_right_logical reduce_precision bitcast_convert_type real imag complex conj mulhi",
        "acos acosh asin asinh atan atan2 atanh cbrt cos cosh exp exp2 expm1 log log1p logistic",
        "rsqrt sin sinh sqrt tan tanh erf erf_inv erfc lgamma digamma",
        "broadcast_in_dim broadcast_to concatenate copy dynamic_slice dynamic_update_slice empty",
        "gather iota pad reshape rev scatter scatter-add scatter-max scatter-min scatter-mul",
        "scatter-sub slice split squeeze stack unstack tile transpose",
        "argmax argmin cumlogsumexp cummax cummin cumprod cumsum reduce reduce_and reduce_max",
        "reduce_min reduce_or reduce_prod reduce_sum reduce_xor reduce_window reduce_window_max",
        "reduce_window_min reduce_window_sum select_and_gather_add select_and_scatter_add",
        "dot_general fft sort top_k",
        "random_bits random_clone random_fold_in random_seed random_split random_unwrap",
        "random_wrap rng_bit_generator threefry2x32 iota_2x32_shape",
        "all_gather axis_index pmax psum pvary debug_callback pure_callback name",
        "optimization_barrier stop_gradient scan while cond jit call closed_call remat2",
        "custom_jvp_call custom_lin custom_vjp_call shard_map",
    )
    for name in line.split()
)


def own_loops(jaxpr: Jaxpr) -> Iterator[Any]:
    """mixfl's own loops, without those inside of others."""
    for eqn in jaxpr.eqns:
        if is_loop(eqn):
            yield eqn
        else:
            for inner in jaxprs_in_params(eqn.params):
                yield from own_loops(inner)


def unknown_operators(jaxpr: Jaxpr) -> set[str]:
    """The operators in the loops that may be slow there."""
    return {name for eqn in own_loops(jaxpr) for name in inner_names(eqn)} - KNOWN


def slow_in_loops(jaxpr: Jaxpr, devices: int) -> bool:
    """Do the loops clearly run faster on the host? Timed, unless it is known from before."""
    loops = [eqn for eqn in own_loops(jaxpr) if {*inner_names(eqn)} - KNOWN]
    name = digest(map(str, loops), devices)
    kept = read()
    if name not in kept:
        compiled, host = np.sum([timed(eqn) for eqn in loops], axis=0)
        # On the host, one device has all clients.
        kept[name] = bool(compiled > CLEARLY * devices * host)
        write(kept)
    return kept[name]


def timed(eqn: Any) -> tuple[float, float]:
    """Seconds of two iterations of a loop: compiled, and on the host."""
    eqn = bounded(eqn)
    p, given = eqn.params, [filled(v.aval.shape, v.aval.dtype) for v in eqn.invars]
    if eqn.primitive.name == "scan":
        fixed = p["num_consts"] + p["num_carry"]
        given = [a if i < fixed else a[:1].repeat(2, 0) for i, a in enumerate(given)]

        def two(*given):  # XLA makes no loop of one
            return eqn.primitive.bind(*given, **{**p, "length": 2})

    else:
        given = given[p["cond_nconsts"] :]

        def two(*given):
            consts, carry = given[: p["body_nconsts"]], list(given[p["body_nconsts"] :])
            body = jaxpr_as_fun(p["body_jaxpr"])
            return jax.lax.fori_loop(0, 2, lambda _, carry: body(*consts, *carry), carry)

    def on_host(*given):
        with jax.named_scope(LOOP):
            return two(*given)

    host = _seconds(Dispatched(on_host), given)
    return _seconds(jax.jit(two), given), host


def filled(shape, dtype):
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.split(jax.random.key(0), shape)
    small = 0.01 if jnp.issubdtype(dtype, jnp.inexact) else 0
    return jnp.full(shape, small, dtype)


def _seconds(function, given) -> float:
    """The shortest of a few calls, after one that compiles."""
    jax.block_until_ready(function(*given))
    taken: list[float] = []
    while not taken or (sum(taken) < SECONDS and len(taken) < 5):
        begin = time.perf_counter()
        jax.block_until_ready(function(*given))
        taken.append(time.perf_counter() - begin)
    return min(taken)


# What was found before


def digest(operations: Iterable[str], ways: Any) -> str:
    text = "\n".join(operations)
    text = re.sub(r"0x[0-9a-f]+", "", text)  # addresses of functions
    about = f"{text}\n{jax.__version__} {os.cpu_count()} {ways}"
    return hashlib.sha256(about.encode()).hexdigest()


def _file() -> Path:
    return programs_folder() / "loops.json"


def read() -> dict[str, Any]:
    try:
        kept = json.loads(_file().read_text())
        return kept if isinstance(kept, dict) else {}
    except (OSError, ValueError):
        return {}


def write(kept: dict[str, Any]) -> None:
    """A file that can't be written only means that it is timed again."""
    text = json.dumps(dict(list(kept.items())[-MOST_KEPT:]))
    new = _file().with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        new.write_text(text)
        new.replace(_file())
