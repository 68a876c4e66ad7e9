"""A node's part: its own data, and an algorithm's `client` on it."""

import dataclasses
import functools
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flwr.app import RecordDict

from mixfl.algorithms.contract import Batches, ClientFeed
from mixfl.deploy.flower import messages
from mixfl.deploy.flower.config import chosen
from mixfl.deploy.flower.simulated import load, number, population
from mixfl.engine.auto import row_sparse_tables
from mixfl.engine.cohort import cohort_rows
from mixfl.engine.preflight import attempt, check_loss, check_rows
from mixfl.errors import MixflError
from mixfl.forms.rows import own_part, renumber
from mixfl.problem import Central, Problem
from mixfl.process.compilation_cache import keep_programs


class Client:
    """Holds its data and compiled programs: it may live as long as one likes."""

    def __init__(self, problem: Problem, run_config: Mapping[str, Any], node: Mapping[str, Any]):
        keep_programs()
        problem, recipe, s, _ = chosen(problem, run_config)
        self.number, self.s = number(node), s
        elsewhere = population(problem, node)
        data = attempt(f"loading the data of '{elsewhere.name}'", lambda: load(elsewhere, node))
        self.term = dataclasses.replace(elsewhere, clients=data)
        self.population = problem.populations.index(elsewhere)
        terms = [self.term if t is elsewhere else _without_data(t) for t in problem.terms]
        local = dataclasses.replace(problem, terms=terms)
        self.algorithm = recipe.build(local, s)
        self.init = functools.partial(problem.init, jax.random.key(s.seed))
        self.x = jax.eval_shape(self.init)  # the model's shapes
        found = row_sparse_tables(local, self.x, self.algorithm, s)
        self.tables = found.get(self.term.name, {})
        self.columns, self.rows = self._own_rows()
        self.program = self._in_pytorch() or jax.jit(self._train)

    def _own_rows(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Its columns with positions in its own rows of the tables, and these rows."""
        columns = self.term.examples.all()
        every = {name: a[None] for name, a in columns.items()}
        most = {
            name: min(table.rows, sum(columns[c].size for c in table.columns))
            for name, table in self.tables.items()
        }
        local, ids = renumber(every, self.tables, most)
        rows = {name: ids[name][0][ids[name][0] < t.rows] for name, t in self.tables.items()}
        return {name: a[0] for name, a in local.items()}, rows

    def hello(self) -> RecordDict:
        """Who it is. A mistake in the loss or the data shows here, before any round."""
        check_loss(self.term, self.x)
        if self.tables:
            check_rows(self.term, self.init())
        return messages.hello(self.term.name, self.number, self.rows)

    def train(self, content: RecordDict) -> RecordDict:
        """Its part of a round."""
        try:
            task = messages.parsed_task(content, self.x, self.rows)
        except messages.Rejected as rejected:
            raise MixflError(f"the server's message is not of this problem: {rejected}.") from None
        if task is None:
            return messages.STALE
        round, message = task
        return messages.upload(self.program(message, self.feed(round)))

    def feed(self, round: int) -> ClientFeed:
        """Its batches of a round, in the order in which the simulator would read them."""
        s, n = self.s, len(self.term.examples)
        steps, batch = min(s.local_steps, -(-n // s.client_batch)), min(s.client_batch, n)
        own = np.array([self.number], np.uint64)
        rows, mask = cohort_rows(s.seed, round, self.population, own, [0], [n], steps, batch)
        return ClientFeed(Batches({c: a[rows[0]] for c, a in self.columns.items()}, mask[0]))

    def _train(self, message, feed):
        return self._own_part(self.algorithm.client(self.term, message, feed), message)

    def _own_part(self, upload, message):
        return own_part(upload, message.aug, self.tables, self.s.client_lr)

    def _in_pytorch(self):
        """The same in PyTorch, where the loss is written in it and the steps are on it alone."""
        if "mixfl.pytorch" not in sys.modules:
            return None
        from mixfl import pytorch

        own = isinstance(self.term.loss, pytorch.Loss) and self.algorithm.feed.own
        if not own or pytorch.optimizer(self.s) is None:
            return None

        def train(message, feed):
            sent = jax.eval_shape(self._train, message, feed)
            collect = sent.grads is not None
            upload = pytorch.client_update(self.term, self.s, message, feed, collect)
            return self._own_part(upload, message)

        return train


def _without_data(term):
    """A term whose data is elsewhere, as far as clients need it."""
    return dataclasses.replace(term, data=None) if isinstance(term, Central) else term


_clients: dict[int, tuple[Problem, dict, Client]] = {}  # by node


def client_of(problem: Problem, run_config: Mapping[str, Any], node: Mapping[str, Any]) -> Client:
    """The client of a node; the same one where it is asked for again in this process."""
    place, given = node["node-id"], {**run_config, "node": dict(node)}
    kept = _clients.get(place)
    if kept is None or kept[0] is not problem or kept[1] != given:
        _clients.pop(place, None)  # before another one takes its memory
        _clients[place] = kept = (problem, given, Client(problem, run_config, node))
    return kept[2]
