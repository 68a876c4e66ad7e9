"""Do the processes that train one model have the same settings and the same data?"""

import zlib
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mixfl.engine import processes
from mixfl.errors import MixflError
from mixfl.problem import Problem


def check_alike(problem: Problem, config: dict[str, Any]) -> None:
    """They must have the same settings and data. The data's path may differ."""
    if jax.process_count() == 1:
        return
    own = {k: v for k, v in config.items() if k != "data"} | {"task": Path(config["task"]).name}
    for term in problem.terms:
        if term.examples is not None:
            some = term.examples.take(np.linspace(0, len(term.examples) - 1, 16).astype(np.int64))
            parts = [len(term.examples), *(zlib.crc32(a.tobytes()) for a in some.values())]
            own[f"the data of '{term.name}'"] = parts
    for term in problem.populations:
        own[f"the clients of '{term.name}'"] = zlib.crc32(
            np.asarray(term.clients.offsets).tobytes()
        )
    if digest := problem.frozen_digest():
        own["the frozen arrays"] = digest
    with processes.Together():
        expected, *others = processes.gather(own)
        for i, other in enumerate(others, 1):
            changed = [
                f"{k}: {other.get(k, 'unset')} and not {expected.get(k, 'unset')}"
                for k in sorted({*other, *expected})
                if other.get(k) != expected.get(k)
            ]
            if changed:
                raise MixflError(
                    f"process {i} has other settings or data than process 0 "
                    f"({'; '.join(changed)}): start all processes with the same command."
                )
