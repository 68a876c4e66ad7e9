"""A node's part: its own data, and an algorithm's `client` on it."""

import dataclasses
import functools
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flwr.app import RecordDict

from mixfl.aggregation import chain
from mixfl.aggregation.download import Download
from mixfl.aggregation.wire import Sent, encoded
from mixfl.algorithms.contract import Batches, ClientFeed, Drawn, Recipe
from mixfl.algorithms.marks import known_marks, marked_by_user, uses_own_loss_only
from mixfl.algorithms.origin import rate_of, with_rates
from mixfl.deploy.flower import frozen, messages
from mixfl.deploy.flower.config import chosen
from mixfl.deploy.flower.messages import check_norms
from mixfl.deploy.flower.no_loss import NoLoss
from mixfl.deploy.flower.secure_node import demanded
from mixfl.deploy.flower.secure_sums import Asked, Coding, secure_chain
from mixfl.deploy.flower.simulated import load, number, population
from mixfl.deploy.secure.ring import Layout, Vector
from mixfl.engine.auto import choose_forms, in_fast_form
from mixfl.engine.cohort import ORDER, client_example_keys, client_keys, cohort_rows
from mixfl.engine.first_model import first_model
from mixfl.engine.preflight import attempt, check_apart, check_loss, check_purity, check_rows
from mixfl.engine.sizes import largest_shape
from mixfl.errors import MixflError
from mixfl.forms.base import alone
from mixfl.forms.half import in_half
from mixfl.forms.rows import RowForm, distinct, renumber
from mixfl.problem import Central, Problem
from mixfl.randomness import KEYS, takes_key


class Client:
    """Holds its data and compiled programs. It can be kept for any number of rounds."""

    def __init__(self, problem: Problem, run_config: Mapping[str, Any], node: Mapping[str, Any]):
        problem, recipe, s, d = chosen(problem, run_config)
        self.number, self.s, self.d = number(node), s, d
        if demanded(node) and not d.secure:
            raise MixflError(
                "this node's configuration (secure-min, secure-peers) allows training only under "
                "secure aggregation, and the run has secure = false."
            )
        elsewhere = population(problem, node)
        data = attempt(f"loading the data of '{elsewhere.name}'", lambda: load(elsewhere, node))
        self.term = _uncompiled(dataclasses.replace(elsewhere, clients=data))
        self.population = problem.populations.index(elsewhere)
        others = {t.name: _uncompiled(_without_data(t)) for t in problem.terms}
        terms = [self.term if t is elsewhere else others[t.name] for t in problem.terms]
        local = in_half(dataclasses.replace(problem, terms=terms), s)
        self.term = local.populations[self.population]
        self.frozen = local.frozen_digest()
        self.algorithm = recipe.build(local, s)
        self.extra = functools.partial(self._extra, recipe, local)
        self.scheduled = self.algorithm.origin.scheduled(0)  # type: ignore[union-attr]
        self.init = functools.partial(first_model, problem, s.seed)
        self.x = jax.eval_shape(problem.init, jax.random.key(s.seed))  # the model's shapes
        self.aggregation = (secure_chain(s) if d.secure else chain(s)).at(client=True)
        self.download = Download(s)
        forms = choose_forms(local, self.x, known_marks(self.algorithm), s, self.aggregation)
        self.tables = forms.tables.get(self.term.name, {})
        # It gets and sends only its own rows of a table. To the client, they are the whole table.
        self.forms = [f for f in forms.of[self.term.name] if not isinstance(f, RowForm)]
        self.columns, self.rows = self._own_rows()
        self.program = self._in_pytorch()
        if self.program is None:
            self.local, self.algorithm = in_fast_form(local, self.x, self.algorithm, s)
            self.term = self.local.populations[self.population]
            self.program = functools.partial(jax.jit(self._train), local.frozen_arrays())

    def _own_rows(self) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        """Its columns, with positions among its own table rows, and these rows."""
        columns = self.term.examples.all()
        every = {name: a[None] for name, a in columns.items()}
        most = {
            name: min(table.rows, sum(columns[c].size for c in table.columns))
            for name, table in self.tables.items()
        }
        local, ids = renumber(every, self.tables, most)
        columns = {name: a[0] for name, a in local.items()}
        rows: dict[str, np.ndarray] = {}
        for alike in distinct(self.tables).values():
            table = self.tables[alike[0]]
            held = ids[alike[0]][0]
            held = held[held < table.rows]
            order = np.argsort(held)
            rows |= dict.fromkeys(alike, held[order])
            place = np.empty(len(held), np.int32)
            place[order] = np.arange(len(held), dtype=np.int32)
            columns |= {name: place[columns[name]] for name in table.columns}
        return columns, {name: rows[name] for name in self.tables}

    def hello(self) -> RecordDict:
        """Who it is. A mistake in the loss or the data shows here, before any round."""
        check_loss(self.term, self.x)
        check_purity(self.term, self.x, self.init)
        check_apart(self.term, self.x)
        if self.tables:
            check_rows(self.term, self.init())
        named = messages.only_named(self.rows, self.tables)
        return messages.hello(self.term.name, self.number, named, self.frozen)

    def train(self, content: RecordDict) -> RecordDict:
        """Its part of a round."""
        if self.d.secure:
            raise MixflError("the run has secure = true, and the server asks for a plain change.")
        task = self._task(content)
        if task is None:
            return messages.STALE
        return messages.upload(self._trained(task), self.aggregation.bits(task.told))

    def secured(
        self, content: RecordDict, clients: int, bits: int, both: bool, steps: int
    ) -> tuple[Layout, Vector] | tuple[RecordDict, None]:
        """Its part of a round, to be masked; or what to reply instead."""
        if not self.d.secure:
            raise MixflError("the run has secure = false, and the server asks for a masked change.")
        task = self._task(content)
        if task is None:
            return messages.STALE, None
        self._check_noise(task.told[-1])
        sent = jax.tree.map(np.asarray, self._trained(task))
        asked = Asked(bits, both, steps)
        try:
            coding = Coding(self.s.of(self.term), sent, task.told[-1], clients, asked)
            if not self.s.private:  # a private change is shortened, and nobody is told
                check_norms(sent, self.d.max_update_norm)
            return coding.layout, coding.vector(sent)
        except messages.Rejected as rejected:
            raise MixflError(f"this client takes no part in the round: {rejected}.") from None

    @property
    def apart(self) -> int:
        """Rounds from one participation to the next, whatever the server asks."""
        return self.s.dp_min_sep if self.s.private else 1

    def _check_noise(self, told: Any) -> None:
        """A server may not ask for less noise than the run's configuration has."""
        least = self.s.dp_noise_multiplier
        if self.s.private and least is not None and float(told.noise) < float(np.float32(least)):
            raise MixflError(
                f"the server asks for noise of {float(told.noise):g} clip norms; the run's "
                f"configuration has dp_noise_multiplier = {least:g}."
            )

    def _task(self, content: RecordDict) -> messages.Task | None:
        try:
            told = self.aggregation.told(self.aggregation.init(self.x, self.population))
            task = messages.parsed_task(
                content, self.x, self.rows, told, self.extra, self.scheduled, self.download
            )
        except messages.Rejected as rejected:
            raise MixflError(f"the server's message is not of this problem: {rejected}.") from None
        if task is not None and frozen.digest_in(content) != self.frozen:
            raise MixflError(frozen.OTHERS)
        return task

    def _trained(self, task: messages.Task) -> Sent:
        broadcast = jax.tree.map(np.asarray, self.download.decoded(task.broadcast))
        return self.program(broadcast, self.feed(task.round), task.told, task.rates)

    def feed(self, round: int) -> ClientFeed:
        """Its batches of a round, in the order in which the simulator would read them."""
        s, n = self.s.of(self.term), len(self.term.examples)
        own = np.array([self.number], np.uint64)
        steps, batch = largest_shape(self.term, s)
        rows, mask = cohort_rows(
            s.seed, round, self.population, own, [0], [n], steps, batch, [steps]
        )
        data = {c: a[rows[0]] for c, a in self.columns.items()}
        if takes_key(self.term.loss):
            data[KEYS] = client_example_keys(
                s.seed, round, ORDER, self.population, own, steps, batch
            )[0]
        key = client_keys(s.seed, round, self.population, own)[0]
        feed = ClientFeed(Batches(data, mask[0]), key=key if self.aggregation.random else None)
        feed = jax.tree.map(lambda a: a[None], feed)  # forms read those of several clients
        for form in self.forms:
            feed = form.read(feed)
        return jax.tree.map(lambda a: a[0], feed)

    def _extra(self, recipe: Recipe, local: Problem) -> Any:
        """The shapes of the algorithm's own fields in what the server sends."""
        terms = [dataclasses.replace(t, loss=NoLoss()) for t in local.terms]
        algorithm = recipe.build(dataclasses.replace(local, terms=terms), self.s)

        def drawn(draw):
            return draw and Drawn({}, np.ones((draw.steps, 1, 1), np.float32))

        def extra():
            state = algorithm.init(self.init())
            sent = algorithm.broadcast(state, [drawn(draw) for draw in algorithm.feed.draw])
            return sent[self.population].extra

        return jax.eval_shape(extra)

    def _train(self, arrays, broadcast, feed, told, rates) -> Sent:
        """`arrays` are the frozen ones."""
        algorithm = with_rates(self.algorithm, rates, arrays)
        local = self.local.with_frozen(arrays) if arrays else self.local
        term = local.populations[self.population]
        return self._encoded(alone(algorithm, self.forms, term, broadcast, feed), feed, told)

    def _encoded(self, summand, feed, told) -> Sent:
        if self.aggregation.random:  # what it draws for a row must not depend on the others
            summand = RowForm(self.tables, {}).marked(summand, self.rows)
        return encoded(self.aggregation, told, summand, feed.key, self.x)

    def _in_pytorch(self):
        """The same in PyTorch, if the loss is written in it and the steps use only this loss."""
        if "mixfl.pytorch" not in sys.modules:
            return None
        from mixfl.deploy import pytorch

        known = uses_own_loss_only(self.algorithm) and not marked_by_user(self.algorithm)
        own = isinstance(self.term.loss, pytorch.Loss) and known
        if not own or pytorch.optimizer(self.s.of(self.term).at(0)) is None:
            return None

        def train(broadcast, feed, told, rates):
            client = functools.partial(self.algorithm.client, self.term)
            collect = jax.eval_shape(client, broadcast, feed._replace(key=None)).grads is not None
            s = self.s.of(self.term).at(0)
            lr = rates.get(rate_of(self.term), rates.get("client_lr", s.client_lr))
            s = dataclasses.replace(s, client_lr=lr)
            upload = pytorch.client_update(self.term, s, broadcast, feed, collect)
            return self._encoded(self.algorithm.summand(upload), feed, told)

        return train


def _uncompiled(term):
    """A loss in PyTorch stays PyTorch at a node, whoever takes the steps."""
    if not hasattr(term.loss, "in_pytorch"):
        return term
    return dataclasses.replace(term, loss=term.loss.in_pytorch())


def _without_data(term):
    """A term without the data that clients don't have."""
    return dataclasses.replace(term, data=None) if isinstance(term, Central) else term


_clients: dict[int, tuple[Problem, dict, Client]] = {}  # by node


def client_of(
    problem: Problem, run_config: Mapping[str, Any], node: Mapping[str, Any], content: RecordDict
) -> Client | None:
    """The client of a node, for a message to it; None if it lacks the frozen arrays. Within a
    process, later calls return the same one."""
    place = node["node-id"]
    given = {**run_config, "node": dict(node), "frozen": frozen.digest_in(content)}
    kept = _clients.get(place)
    if kept is None or kept[0] is not problem or kept[1] != given:
        _clients.pop(place, None)  # before another one takes its memory
        complete = frozen.at_node(problem, content)
        if complete is None:
            return None
        _clients[place] = kept = (problem, given, Client(complete, run_config, node))
    return kept[2]
