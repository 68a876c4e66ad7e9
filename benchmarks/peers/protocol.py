"""The protocol between an engine's worker and the driver, and how a worker reads a workload.

A worker is a process that reads one JSON object per line from stdin and answers each with one line:

    {"do": "init", "folder": F}        reads the workload in F            -> {"seconds": s}
    {"do": "run", "rounds": N}         runs N more rounds                 -> {"seconds": s}
    {"do": "parameters", "path": P}    writes the model to P (.npz)       -> {}
    {"do": "parts"}                    measures where its time goes       -> what it found
    {"do": "memory"}                   predicts what a round holds        -> in MB
    {"do": "quit"}

After an error, the answer is {"error": text}. The driver measures the memory of the worker's
processes itself. This module needs only the standard library and NumPy, which every virtual
environment has.
"""

import json
import os
import sys
import time
import traceback
from pathlib import Path

import numpy as np


class Workload:
    """A folder of `benchmarks.workloads`, memory-mapped."""

    def __init__(self, folder):
        folder = Path(folder)
        self.size = json.loads((folder / "settings.json").read_text())
        self.model = self.size["model"]
        self.task = self.size["task"]
        self.S, self.K, self.B = (self.size[k] for k in "SKB")
        self.columns = {
            p.stem: np.asarray(np.load(p, mmap_mode="r"))
            for p in sorted((folder / "columns").glob("*.npy"))
        }
        self.order = np.load(folder / "order.npy")
        self.folder = folder
        with np.load(folder / "params.npz") as stored:
            self.params = dict(stored)

    def client(self, t, i):
        """The examples of the i-th client of round t, in the order in which it trains."""
        rows = self.order[t % len(self.order), i]
        return {name: column[rows] for name, column in self.columns.items()}

    def cohort(self, t):
        """All clients of round t: columns [S, K, |B_i|, ...]."""
        rows = self.order[t % len(self.order)].reshape(self.S, self.K, self.B)
        return {name: column[rows] for name, column in self.columns.items()}

    def central_rows(self, algorithm, t):
        """[steps, batch]: the rows of the server's batches in round t."""
        rows = np.load(self.folder / "central_order" / f"{algorithm}.npy", mmap_mode="r")
        return rows[t % len(rows)]

    def central(self, rows):
        """The server's examples."""
        files = sorted((self.folder / "central").glob("*.npy"))
        return {p.stem: np.load(p, mmap_mode="r")[rows] for p in files}


def tree(named):
    """{"a/b": x} -> {"a": {"b": x}}"""
    nested = {}
    for name, value in named.items():
        *folders, last = name.split("/")
        at = nested
        for folder in folders:
            at = at.setdefault(folder, {})
        at[last] = value
    return nested


def flat(params, prefix=""):
    """The inverse of `tree`."""
    named = {}
    for name, value in params.items():
        if isinstance(value, dict):
            named |= flat(value, f"{prefix}{name}/")
        else:
            named[prefix + name] = np.asarray(value)
    return named


def serve(engine):
    """Answers until "quit". `engine` has init(folder), run(rounds) and parameters()."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    for line in sys.stdin:
        asked = json.loads(line)
        if asked["do"] == "quit":
            return
        try:
            answer = _answer(engine, asked)
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _answer(engine, asked):
    begun = time.perf_counter()
    if asked["do"] == "init":
        engine.init(asked["folder"])
        return {"seconds": time.perf_counter() - begun}
    if asked["do"] == "run":
        engine.run(asked["rounds"])
        return {"seconds": time.perf_counter() - begun}
    if asked["do"] == "parameters":
        np.savez(asked["path"], **engine.parameters())
        return {}
    if asked["do"] == "parts":
        return engine.parts()
    if asked["do"] == "memory":
        return engine.memory()
    raise ValueError(f"unknown request {asked['do']!r}")
