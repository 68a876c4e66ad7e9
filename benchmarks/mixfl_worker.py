"""mixfl's worker: runs one algorithm in the simulator, from a memory-mapped store.

    python -m benchmarks.mixfl_worker ALGORITHM [key=value ...]

Every request to run starts a new loop over exactly the requested rounds, so the measured time
includes all reading for them, even what the simulator reads ahead.
"""

import sys
from pathlib import Path

import jax

import mixfl
from benchmarks import workloads
from benchmarks.peers import protocol
from mixfl.algorithms import ALGORITHMS
from mixfl.data import ClientData
from mixfl.engine import Simulator


class Engine:
    def __init__(self, algorithm: str = "fedavg", **more):
        self.algorithm, self.more = algorithm, more

    def init(self, folder):
        folder = Path(folder)
        size = workloads.read_size(folder)
        problem = workloads.problem(size, ClientData.open(folder / "store"))
        s = workloads.settings(size, **self.more)
        self.simulator = Simulator(problem, ALGORITHMS[self.algorithm].build(problem, s), s)
        self.state, self.t = self.simulator.init(), 0

    def run(self, rounds):
        for result in self.simulator.rounds(self.state, self.t, self.t + rounds):
            self.state, self.t = result.state, result.round
        jax.block_until_ready(self.state)

    def parameters(self):
        return workloads.named(self.state.x)


if __name__ == "__main__":
    mixfl.prepare_process()  # as the command line does
    given = dict(argument.split("=", 1) for argument in sys.argv[2:])
    protocol.serve(
        Engine(sys.argv[1], **{k: int(v) if v.isdigit() else v for k, v in given.items()})
    )
