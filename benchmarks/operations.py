"""What the operations of compiled programs are and how long they take, from JAX's profiler.

An operation that XLA gives to several threads counts with the time of the thread that waits for it,
so shares are approximate.
"""

import collections
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

LARGEST = 3
AROUND = r"while|conditional|call|tuple|get-tuple|async"  # these contain other operations
KINDS = {  # by what XLA calls an operation; the first that fits
    "products": r"dot|conv(?!ert)|ynn|onednn|.*(_dot|convolution)",
    "calls of Python": r".*(custom-call|callback)",
    "between devices": r"all-|collective|partition-id|reduce-scatter",
    "gathers, scatters, pools": r".*(gather|scatter|sort|reduce-window)",
    "copies": r"(wrapped_)?(copy|transpose|bitcast|concatenate|slice|dynamic|pad|reverse)"
    r"(?!.*(add|multiply|subtract|tanh|exp|divide|select|reduce))",
}
OTHERS = "elementwise and sums"


def profile(call: Callable[[], object]) -> dict:
    """{"kinds": shares by kind, "largest": shares of the longest operations}."""
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            call()
        file = next(Path(folder).rglob("*.xplane.pb"))
        return shares(times(jax.profiler.ProfileData.from_file(str(file))))


def times(profile) -> dict[str, float]:
    """Nanoseconds of each operation."""
    total: collections.Counter = collections.Counter()
    for plane in profile.planes:
        for line in plane.lines:
            for event in line.events:
                if any(key == "hlo_op" for key, _ in event.stats):
                    total[event.name] += event.duration_ns
    return total


def shares(times: dict[str, float]) -> dict:
    own = {name: t for name, t in times.items() if not re.match(AROUND, name)}
    whole = sum(own.values()) or 1
    kinds: collections.Counter = collections.Counter()
    for name, t in own.items():
        kinds[kind(name)] += t / whole
    longest = sorted(own, key=own.__getitem__, reverse=True)[:LARGEST]
    return {
        "kinds": {name: round(share, 3) for name, share in kinds.most_common()},
        "largest": {name: round(own[name] / whole, 3) for name in longest},
    }


def kind(name: str) -> str:
    return next((k for k, pattern in KINDS.items() if re.match(pattern, name)), OTHERS)
