"""The cost of differential privacy in time per round: `python -m benchmarks.dp [smile text movie]`.

Rounds with and without it alternate in one process, so both see the same machine. The figure is the
ratio of the medians. Everything that a private run adds is in it: exact norms, clipping, noise on
every parameter. A run without it clips too (`clip=quantile`), as by default.
"""

import statistics
import sys
import time

import jax

from mixfl.process import prepare_process

REPEATS = 9
DP = dict(dp_noise_multiplier=1.0, dp_delta=1e-6, dp_clip=0.1, dp_sampling="none")


def simulator(task: str, algorithm: str, given: dict):
    from mixfl.runs.plan import plan

    planned = plan(task, algorithm, preset="cpu", given={"rounds": 1000, **given})
    return planned.simulator()


def rounds(sim):
    """Yields the seconds of each round, after the first, which compiles."""
    results = sim.rounds(sim.init(), 0, 1000)
    jax.block_until_ready(next(results).state)
    while True:
        begun = time.perf_counter()
        jax.block_until_ready(next(results).state)
        yield time.perf_counter() - begun


def ratio(task: str, algorithm: str) -> tuple[float, float, float]:
    plain, private = (rounds(simulator(task, algorithm, given)) for given in ({}, DP))
    times = [(next(plain), next(private)) for _ in range(REPEATS)]
    a, b = (statistics.median(column) for column in zip(*times, strict=True))
    return a, b, b / a


def main() -> None:
    prepare_process("auto")
    for task in sys.argv[1:] or ("smile", "text", "movie"):
        for algorithm in ("fedavg", "2wgt"):
            a, b, times = ratio(task, algorithm)
            print(
                f"{task} {algorithm}: {1000 * a:.1f} ms a round, private {1000 * b:.1f} ms: "
                f"{times:.2f} times",
                flush=True,
            )


if __name__ == "__main__":
    main()
