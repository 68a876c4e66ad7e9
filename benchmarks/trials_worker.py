"""Runs rounds of several trials, which differ only in their seed, in one process.

    python -m benchmarks.trials_worker TASK SEEDS WAY

SEEDS are separated by commas. WAY is `turns` (one trial after another, on all cores), `alone` (the
same, on one core), `devices` (one program, one trial per core) or `vmap` (one program, all at
once).
"""

import functools
import os
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mixfl
from benchmarks.peers import protocol
from mixfl.engine.prefetch import Prefetch
from mixfl.runs.plan import plan

WAYS = ("turns", "alone", "devices", "vmap")
ALGORITHM, PRESET = "pt", "demo"  # as in sweeps at the quick scale


class Engine:
    def __init__(self, task: str, seeds: str, way: str):
        self.task, self.seeds, self.way, self.t = task, list(map(int, seeds.split(","))), way, 0

    def init(self, folder=None):
        devices = os.cpu_count() if self.way == "turns" else 1
        problems: dict = {}
        self.simulators = [
            plan(
                self.task, ALGORITHM, preset=PRESET, given={"seed": seed, "devices": devices},
                problems=problems,
            ).simulator()
            for seed in self.seeds
        ]  # fmt: skip
        self.states = [s.init() for s in self.simulators]
        if self.way in ("devices", "vmap"):
            self.states = stacked(self.states)
            first = next(pieces(self.simulators, 0, 1))
            self.program = together(self.simulators[0], self.way, (self.states, *first))

    def run(self, rounds):
        start, self.t = self.t, self.t + rounds
        if self.way not in ("devices", "vmap"):
            for k, simulator in enumerate(self.simulators):
                for result in simulator.rounds(self.states[k], start, self.t):
                    self.states[k] = result.state
        else:
            feed = Prefetch(functools.partial(pieces, self.simulators, start, self.t))
            for drawn, clients in feed:
                self.states, _ = self.program(self.states, drawn, clients)
            feed.close()
        jax.block_until_ready(self.states)

    def models(self):
        """The model of each trial."""
        if self.way in ("devices", "vmap"):
            every = jax.device_get(self.states.x)
            return [jax.tree.map(lambda a, k=k: a[k], every) for k in range(len(self.seeds))]
        return [jax.device_get(state.x) for state in self.states]


def stacked(trees):
    return jax.tree.map(lambda *leaves: np.stack([np.asarray(a) for a in leaves]), *trees)


def pieces(simulators, start, stop):
    """The inputs of the rounds of all trials, [trials, ...]."""
    for t in range(start, stop):
        fed = []
        for s in simulators:
            (piece,) = s.feeder.pieces(s.at(t), t)
            # Copies: the trials' feeders may share buffers.
            fed.append(jax.tree.map(np.array, (piece.drawn, piece.clients)))
        yield stacked(fed)


def together(simulator, way: str, fed):
    """A round of all trials in one program."""
    one = simulator.program(simulator.at(0))._whole
    if way == "vmap":
        # Under vmap, the second scan (which looks for non-finite updates) would always run.
        with mock.patch("mixfl.engine.summing.finite", return_value=jnp.bool(True)):
            return jax.jit(jax.vmap(one), donate_argnums=0).lower(*fed).compile()
    mesh = Mesh(np.array(jax.devices()[: len(jax.tree.leaves(fed)[0])]), ("trials",))

    def own(*given):  # a device's own trial
        result = one(*jax.tree.map(lambda a: a[0], given))
        return jax.tree.map(lambda a: a[None], result)

    spread = jax.shard_map(
        own, mesh=mesh, in_specs=P("trials"), out_specs=P("trials"), check_vma=False
    )
    placed = NamedSharding(mesh, P("trials"))
    return jax.jit(spread, donate_argnums=0, in_shardings=placed, out_shardings=placed)


if __name__ == "__main__":
    _, task, seeds, way = sys.argv
    if way == "alone":  # one core per worker, as in mixfl's own trials
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[int(seeds.split(",")[0]) % len(cores)]})
    mixfl.prepare_process(devices=1 if way == "alone" else "auto")
    protocol.serve(Engine(task, seeds, way))
