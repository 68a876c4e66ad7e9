"""mixfl's worker: runs one algorithm in the simulator, from a memory-mapped store.

    python -m benchmarks.mixfl_worker ALGORITHM [key=value ...]

Every request to run starts a new loop over exactly the requested rounds, so the measured time
includes all reading for them, even what the simulator reads ahead.
"""

import sys
import time
from pathlib import Path

import jax

import mixfl
from benchmarks import operations, parts, resident, workloads
from benchmarks.peers import protocol
from mixfl.algorithms import ALGORITHMS
from mixfl.data import ClientData
from mixfl.engine import Simulator, memory

MB = 2**20
ROUNDS = 3  # in which memory is measured


class Engine:
    def __init__(self, algorithm: str = "fedavg", **more):
        self.algorithm, self.more = algorithm, more

    def init(self, folder):
        folder = Path(folder)
        size = workloads.read_size(folder)
        problem = self.problem(size, folder)
        s = workloads.settings(size, **self.more)
        self.simulator = Simulator(problem, ALGORITHMS[self.algorithm].build(problem, s), s)
        self.state, self.t = self.simulator.init(), 0

    def problem(self, size, folder):
        return workloads.problem(size, ClientData.open(folder / "store"))

    def run(self, rounds):
        for result in self.simulator.rounds(self.state, self.t, self.t + rounds):
            self.state, self.t = result.state, result.round
        jax.block_until_ready(self.state)

    def parameters(self):
        return workloads.named(self.state.x)

    def parts(self):
        """The parts of a round in ms, and the shares of its operations."""
        begun = time.perf_counter()
        self.run(1)
        took = time.perf_counter() - begun
        rounds = max(1, round(0.3 / took))
        return {
            "ms": parts.round_parts(self, rounds, trials=3),
            **operations.profile(lambda: self.run(rounds)),
        }

    def memory(self):
        """In MB: what rounds add to the resident size, with the state, and what is predicted."""
        self.run(1)
        base = resident.trimmed_mb()
        resident.forget_peak()
        self.run(ROUNDS)
        peak = resident.peak_mb()
        predicted = memory.predicted_bytes(self.simulator)
        held = predicted.devices * predicted.state / MB
        return {
            "devices": predicted.devices, "model_mb": predicted.model / MB,
            "measured_mb": peak - base + held, "predicted_mb": predicted.total / MB,
        }  # fmt: skip


def main(engine):
    mixfl.prepare_process()  # as the command line does
    given = dict(argument.split("=", 1) for argument in sys.argv[2:])
    protocol.serve(
        engine(sys.argv[1], **{k: int(v) if v.isdigit() else v for k, v in given.items()})
    )


if __name__ == "__main__":
    main(Engine)
