"""The rounds of a deployment: an engine like the simulator, whose clients are Flower's nodes.

In a round, the server sends messages and does its central work while the clients train. It fetches
replies until all have arrived or the deadline has passed. The sums go into the algorithm's update.

What a client sends is checked (messages.py). A client that fails in any way is left out and
counted. A round with too few replies is skipped: the state stays as it was, and the next round has
other clients. Summands are added up in the order of the cohort, not in the order of arrival, so a
round has the same bits each time.
"""

import functools
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flwr.serverapp import Grid

from mixfl.aggregation import chain
from mixfl.aggregation.download import Download
from mixfl.aggregation.wire import Sent, encoded, restored
from mixfl.algorithms.contract import Algorithm, Batches, ClientFeed, Recipe, Sums
from mixfl.algorithms.marks import known_marks
from mixfl.algorithms.origin import with_rates
from mixfl.deploy.flower import secure_sums
from mixfl.deploy.flower.config import Deployment, check_deployable
from mixfl.deploy.flower.exchange import Exchange, padded
from mixfl.deploy.flower.link import Link, link_to
from mixfl.deploy.flower.members import Members
from mixfl.deploy.flower.messages import Rejected
from mixfl.deploy.flower.no_loss import NoLoss
from mixfl.deploy.flower.nodes import Nodes
from mixfl.deploy.flower.replies import Clock
from mixfl.deploy.flower.secure_exchange import SecureRounds
from mixfl.deploy.flower.secure_sums import Coding, secure_chain
from mixfl.engine.auto import Forms, choose_forms, model_shapes, resolved
from mixfl.engine.base import KeepsNothing, Progress, RoundBytes, RoundResult
from mixfl.engine.feeding import Draws
from mixfl.engine.first_model import first_model
from mixfl.engine.params import check_params
from mixfl.engine.round import State
from mixfl.engine.summing import compared, finite
from mixfl.forms.base import add_to, zeros_for
from mixfl.forms.half import in_half
from mixfl.forms.rows import RowForm
from mixfl.problem import Problem
from mixfl.settings import Settings

LONGEST_PAUSE = 60.0  # seconds after a failed round


class Programs(NamedTuple):
    """The algorithm's functions, compiled, and the shapes of what clients send."""

    broadcast: Callable  # -> Down
    told: Callable  # the aggregation's states -> what it tells
    report: Callable  # population, told, sent, rows -> its report
    add: Callable  # population, sums, settled, sent, rows -> sums
    compared: Callable  # population, stacked, state -> Summed
    release: Callable  # the aggregation's state, sums -> sums, state
    central: Callable
    update: Callable
    summands: list[Sums]  # per population, the shapes of a summand
    like: list[Sent]  # and of what is sent


class DeployedEngine(KeepsNothing):
    """See Engine in mixfl/engine/base.py."""

    def __init__(
        self, problem: Problem, recipe: Recipe, s: Settings, d: Deployment, grid: Grid | Link,
        note: Callable[[str], None], clock: Clock = time, out: Path | None = None,
    ):  # fmt: skip
        problem = in_half(problem, s)
        self.problem, self.s, self.d = problem, recipe.resolve(problem, s), d
        self.clock, self.note = clock, note
        self.algorithm = recipe.build(problem, self.s)
        check_deployable(recipe, self.algorithm)
        self.aggregation = secure_chain(self.s) if d.secure else chain(self.s)
        self.download = Download(self.s)
        self.forms = self._rows_only(
            choose_forms(
                problem,
                model_shapes(problem),
                known_marks(self.algorithm),
                self.s,
                self.aggregation,
            )
        )
        self.draws = Draws(problem, self.s)
        self.draws.check_draws(self.algorithm.at(0))
        self.members = Members(problem, d, out, note)
        self.nodes = Nodes(
            link_to(grid, clock), problem, self.s, d, self.forms.tables, self.members, clock, note
        )
        self.secure = SecureRounds(self.nodes) if d.secure else None
        self.stop = 0  # the run's last round
        self.programs: dict[Algorithm, Programs] = {}
        self.bytes = RoundBytes(0.0, 0.0)  # of the last round
        self.failures = 0  # failed rounds in a row
        self.on_progress: Callable[[Progress], None] = lambda _: None

    @staticmethod
    def _rows_only(forms: Forms) -> Forms:
        """The forms that the server takes part in. The others concern only the clients."""
        of = {n: tuple(f for f in fs if isinstance(f, RowForm)) for n, fs in forms.of.items()}
        return forms._replace(of=of)

    def init(self) -> Any:
        x = first_model(self.problem, self.s.seed)
        check_params(x)
        clients = self.problem.populations if self.algorithm.feed.clients else ()
        steps = tuple(self.aggregation.init(x, j) for j in range(len(clients)))
        return State(self.algorithm.init(x), steps, self.download.init(x, len(clients)))

    def shapes(self) -> Any:
        return jax.eval_shape(self.init)

    def resolved(self) -> Settings:
        return resolved(
            self.problem, self.s, max([self.s.cohort_size, *self.nodes.wanted]), 1, self.forms
        )

    def notes(self) -> Iterator[str]:
        yield from map(str, self.forms.refused)

    def round_bytes(self, round: int) -> RoundBytes:
        """Bytes per client that were sent and received in the last round."""
        return self.bytes

    def repeated(self) -> int:
        """Clients add the noise: the server has a sum before there is a checkpoint of its round. In
        other private runs a round is released with its checkpoint, once."""
        if self.secure is None or not self.s.private:
            return 0
        self.members.begin()
        return self.members.restarts

    def rounds(self, state: Any, start: int, stop: int) -> Iterator[RoundResult]:
        if start:  # a round that was under way may be repeated with other clients
            every = enumerate(state.aggregation)
            renewed = tuple(self.aggregation.renewed(state_j, j) for j, state_j in every)
            state = state._replace(aggregation=renewed)
        self.stop = stop
        for t in range(start, stop):
            state, info = self._round(t, state)
            yield RoundResult(t + 1, state, info)

    def _round(self, t: int, state: State) -> tuple[State, dict[str, Any]]:
        algorithm = self.algorithm.at(t)
        programs, drawn = self._programs(algorithm, t), self.draws.drawn(algorithm, t)
        rates = self.algorithm.origin.scheduled(t)  # type: ignore[union-attr]
        if not algorithm.feed.clients:
            central = programs.central(state.algorithm, drawn, rates)
            after, info = programs.update(state.algorithm, [], [], central, rates)
            return state._replace(algorithm=after), {**info, "clients/rejected": 0}
        if self.secure is not None:
            return self._secure_round(t, state, programs, drawn, rates)
        cohorts = self.nodes.cohorts(t)
        down = programs.broadcast(state.algorithm, state.download, drawn, rates)
        told = programs.told(state.aggregation)

        def work():  # while the clients train
            return jax.block_until_ready(programs.central(state.algorithm, drawn, rates))

        exchange, central = self._exchange(programs, t, cohorts, down.codes, told, rates, work)
        self.bytes = exchange.bytes()
        if not exchange.short(self.nodes.least):
            settled = self._settled(exchange, told, state.aggregation)
            if settled is not None:
                told = settled
                exchange, _ = self._exchange(programs, t, cohorts, down.codes, told, rates)
                self.bytes = RoundBytes(*np.add(self.bytes, exchange.bytes()))
        counts = exchange.counted()
        self.members.save()
        if short := exchange.short(self.nodes.least):
            self._failed(t, short)
            return state, {**self._published(counts), "rounds/failed": 1, "finite": True}
        self.failures = 0
        sums, aggregation = [], []
        for j, replies in enumerate(exchange.ordered()):
            sums_j, counts_j, after_j = self._sums(
                programs, j, replies, told[j], state.aggregation[j]
            )
            sums.append(sums_j)
            aggregation.append(after_j)
            for name, count in counts_j.items():
                counts[name] = counts.get(name, 0) + int(count)
        after, info = programs.update(state.algorithm, down.broadcasts, sums, central, rates)
        new = State(after, tuple(aggregation), down.errors)
        return new, self._published({**info, **counts})

    def _exchange(self, programs: Programs, t: int, cohorts, codes, told, rates, work=None):
        """The messages and replies of a round, and the work meanwhile."""
        at_client = self.aggregation.at(True)
        own = [self.aggregation.part(told_j, True) for told_j in told]
        bits = [at_client.bits(own_j) for own_j in own]
        exchange = Exchange(self.nodes, t, cohorts, programs.like, bits)
        exchange.push(codes, own, rates)
        done = work() if work else None
        exchange.pull()
        return exchange, done

    def _settled(self, exchange: Exchange, told, states) -> list[Any] | None:
        """What the clients should have been told, if that would change their codes: so it is while
        ranges are not known. None otherwise."""
        if self.aggregation.coder is None:
            return None
        coder, of_coder = self.aggregation.coder, self.aggregation.of_coder
        new, changed = [], False
        for told_j, state, replies in zip(told, states, exchange.ordered(), strict=True):
            reports = coder.received(np.stack([reply.report for _, reply in replies]))
            settled = coder.settled(of_coder(state), of_coder(told_j), reports)
            changed |= bool(coder.changed(of_coder(told_j), settled, reports))
            new.append(tuple(
                settled if step.coder else value
                for step, value in zip(self.aggregation.steps, told_j, strict=True)
            ))  # fmt: skip
        return new if changed else None

    def _secure_round(
        self, t: int, state: State, programs: Programs, drawn, rates
    ) -> tuple[State, dict[str, Any]]:
        """As a round, but the server gets nothing but sums."""
        assert self.secure is not None
        now = self.secure.round(t)
        down = programs.broadcast(state.algorithm, state.download, drawn, rates)
        told = programs.told(state.aggregation)

        def coding(j: int, told_j, clients: int) -> Coding:
            s, like = self.s.of(self.problem.populations[j]), programs.summands[j]
            asked = secure_sums.Asked(
                secure_sums.BITS[s.upload], like.unweighted is not None, like.by_steps.shape[0]
            )
            return Coding(s, programs.like[j], told_j[-1], clients, asked)

        more = t + 1 < self.stop and self.algorithm.at(t + 1).feed.clients
        following = self.nodes.cohorts(t + 1) if more else [[] for _ in told]
        now.push(down.codes, told, rates, coding, following)
        central = jax.block_until_ready(programs.central(state.algorithm, drawn, rates))
        now.pull()
        totals = [] if now.short else now.unmask()
        found = []
        for j, total in enumerate(totals if not now.short else []):
            try:
                clients = len(now.prepared.groups[j].round.alive)
                found.append(now.codings[j].sums(total, clients))
            except Rejected as rejected:
                now.short.append(f"'{self.problem.populations[j].name}': {rejected}")
        self.bytes, counts = now.bytes(), now.counted()
        self.members.save()
        if now.short:
            self._failed(t, now.short)
            return state, {**self._published(counts), "rounds/failed": 1, "finite": True}
        self.failures, aggregation = 0, []
        for (_, levels, saturated), state_j in zip(found, state.aggregation, strict=True):
            counts["clients/saturated"] = counts.get("clients/saturated", 0) + saturated
            ranges: Any = self.aggregation.steps[-1]
            aggregation.append((*state_j[:-1], ranges.after(state_j[-1], levels)))
        sums = [sums_j for sums_j, _, _ in found]
        after, info = programs.update(state.algorithm, down.broadcasts, sums, central, rates)
        new = State(after, tuple(aggregation), down.errors)
        return new, self._published({**info, **counts})

    def _published(self, info: dict[str, Any]) -> dict[str, Any]:
        return self.aggregation.published(info, self.problem)

    def _sums(self, programs: Programs, j: int, replies, told, state) -> tuple[Any, dict, Any]:
        """A population's sums, what the aggregation counted, and its next state."""
        steps = self.aggregation
        if self.s.aggregation != "mean":
            stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *(r for _, r in replies))
            summed = programs.compared(j, stacked, state, told)
            sums = steps.at(True).decode(steps.part(told, True), summed.sums)
            sums, state = programs.release(state, sums)
            return sums, summed.counts, steps.next(state, summed.reports)
        given = [padded(reply, rows, self._tables(j)) for rows, reply in replies]
        each = [programs.report(j, told, *g) for g in given]
        reports = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
        settled = steps.settled(state, told, reports)
        sums = zeros_for(self._marked_shapes(programs, j, told, given[0]))
        for g in given:
            sums = programs.add(j, sums, settled, *g)
        sums, state = programs.release(state, steps.decode(settled, sums))
        return sums, steps.counted(settled, reports), steps.next(state, reports)

    def _failed(self, t: int, short: list[str]) -> None:
        seconds = min(2.0 ** min(self.failures, 10), LONGEST_PAUSE)
        self.failures += 1
        why = "two thirds of a cohort wanted (secure)"
        if self.secure is None:
            least = ", ".join(map(str, dict.fromkeys(self.nodes.least)))
            why = f"at least {least} wanted (min_replies)"
        self.note(
            f"round {t + 1} is skipped: good replies from {', '.join(short)}, {why}; going on in "
            f"{seconds:.0f} s"
        )
        self.clock.sleep(seconds)

    def _tables(self, j: int):
        return self.nodes.tables[self.problem.populations[j].name]

    def _summand(self, like: Sums, j: int, told, given: Sent, ids) -> Sums:
        """What a client sent, as a summand of whole tables."""
        summand = restored(given, like)
        for form in self.forms.of[self.problem.populations[j].name]:
            summand = form.marked(summand, ids)  # type: ignore[attr-defined]
        if self.aggregation.coder is None:
            return summand
        return self.aggregation.coder.taken(self.aggregation.of_coder(told), summand)

    def _marked_shapes(self, programs: Programs, j: int, told, given):
        return jax.eval_shape(
            lambda told, g, ids: self._summand(programs.summands[j], j, told, g, ids), told, *given
        )

    def _programs(self, algorithm: Algorithm, round: int) -> Programs:
        if algorithm in self.programs:
            return self.programs[algorithm]
        summands = self._summand_shapes(algorithm) if algorithm.feed.clients else []
        at_client, at_server = self.aggregation.at(True), self.aggregation.at(False)

        def of_all(reports, given):
            """The reports of the steps at the server, and of that at the clients which makes codes.
            The others are ()."""
            own = iter(reports)
            return tuple(
                next(own) if not step.at_client
                else step.received(given.report) if step.coder else ()
                for step in self.aggregation.steps
            )  # fmt: skip

        def at_end(j, told, given, ids):
            """Applies the steps that run at the server. The others have run at the client."""
            own = self.aggregation.part(told, False)
            return at_server.encode(own, self._summand(summands[j], j, told, given, ids), None)

        def report(j, told, given, ids):
            return of_all(at_end(j, told, given, ids)[1], given)

        def add(j, sums, settled, given, ids):
            return add_to(sums, at_end(j, settled, given, ids)[0])

        def several(j, stacked, state, told):
            every = jax.vmap(lambda g: self._summand(summands[j], j, told, g, {}))(stacked)
            own = self.aggregation.part(state, False)
            summed = compared(self.s, at_server, every, None, own)
            reports = of_all(summed.reports, stacked)
            counts = {**self.aggregation.counted(told, reports), **summed.counts}
            return summed._replace(reports=reports, counts=counts)

        def built(rates, frozen=()) -> Algorithm:
            new = with_rates(self.algorithm, rates, frozen)
            return algorithm if new is self.algorithm else new.at(round)

        def broadcast(frozen, state, errors, drawn, rates):
            return self.download.sent(errors, built(rates, frozen).broadcast(state, drawn))

        def central(frozen, state, drawn, rates):
            return built(rates, frozen).central(state, drawn)

        def update(state, broadcasts, sums, central, rates):
            state, info = built(rates).update(state, broadcasts, sums, central)
            return state, {**info, "finite": finite(state)}

        x = jax.eval_shape(self.problem.init, jax.random.key(0))

        def code(summand, told):
            return encoded(at_client, told, summand, np.zeros(2, np.uint32), x)

        told = self.aggregation.part(self.aggregation.told(self.aggregation.init(x, 0)), True)
        frozen = self.problem.frozen_arrays()
        self.programs[algorithm] = Programs(
            functools.partial(jax.jit(broadcast), frozen),
            jax.jit(lambda states: tuple(map(self.aggregation.told, states))),
            jax.jit(report, static_argnums=0), jax.jit(add, static_argnums=0),
            jax.jit(several, static_argnums=0), jax.jit(self.aggregation.release),
            functools.partial(jax.jit(central), frozen), jax.jit(update),
            summands, [jax.eval_shape(code, summand, told) for summand in summands],
        )  # fmt: skip
        return self.programs[algorithm]

    def _summand_shapes(self, algorithm: Algorithm) -> list[Sums]:
        """Per population, the shapes of a client's summand. The server has no client data to trace
        a loss with, but the shapes do not depend on the loss."""
        one = np.ones((1, 1), np.float32)

        def summand(j: int):
            x = self.problem.init(jax.random.key(self.s.seed))
            broadcast = algorithm.broadcast(algorithm.init(x), self.draws.drawn(algorithm, 0))[j]
            term = replace(self.problem.populations[j], loss=NoLoss())
            feed = ClientFeed(Batches({}, one))
            return algorithm.summand(algorithm.client(term, broadcast, feed))

        populations = range(len(self.problem.populations))
        return [jax.eval_shape(lambda j=j: summand(j)) for j in populations]
