"""The server's part of rounds under secure aggregation: two exchanges with the nodes per round.

    train    the broadcast, and the boxes for each client  ->  masked vectors
    unmask   who survived, and the next round's roster     ->  shares, boxes for the next round,
                                                               keys for the round after that

Clients of the next cohort that have no keys yet are asked for them while the others train. Before
the first round, and after a round in which that did not work, keys and shares are asked for on
their own: two exchanges more.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from mixfl.deploy.flower.asking import Asked, Asking
from mixfl.deploy.flower.messages import Rejected, only_rejected, task
from mixfl.deploy.flower.nodes import Node, Nodes
from mixfl.deploy.flower.reply_limits import Bounds, bounds
from mixfl.deploy.flower.secure_node import FORMAT, RECORD, digest
from mixfl.deploy.flower.secure_sums import Coding
from mixfl.deploy.secure import keys, ring
from mixfl.deploy.secure.client import BOX
from mixfl.deploy.secure.graph import DEGREE, LEAST
from mixfl.deploy.secure.parts import Advert, Refused, parsed
from mixfl.deploy.secure.server import Round, TooFew
from mixfl.deploy.secure.shamir import SHARE
from mixfl.engine.base import RoundBytes

PATIENCE = 60.0  # seconds to wait for what needs no training
PROBE = keys.private_key(bytes(16))  # to see whether a public key is one
NO_ARRAYS = bounds([])
# Keys and their signature, shares and boxes for every neighbour: in the text of a reply.
SMALL = NO_ARRAYS._replace(text=NO_ARRAYS.text + (DEGREE + 1) * (BOX + SHARE + 16))


class Group(NamedTuple):
    """One population's part of a round: who is in its roster, in order, and what they have sent."""

    nodes: list[Node]
    round: Round


class Prepared(NamedTuple):
    t: int
    cohorts: list[list[Node]]
    groups: list[Group]


class Job(NamedTuple):
    bounds: Bounds
    accept: Callable[[RecordDict], None]
    counts: bool  # is the client left out of the round if it fails?


class Stage(Asking):
    """One exchange. `wanted`: may it end before all have replied?"""

    def __init__(self, nodes: Nodes, t: int, wanted: Callable[[], bool] = lambda: False):
        super().__init__(nodes, t)
        self.wanted, self.good = wanted, 0

    def complete(self) -> bool:
        return self.wanted()

    def any_good(self) -> bool:
        return self.good > 0

    def bounds(self, asked: Asked) -> Bounds:
        return asked.like.bounds

    @only_rejected
    def accept(self, asked: Asked, content: RecordDict) -> None:
        try:
            asked.like.accept(content)
            self.good += 1
        except Refused as refused:
            raise Rejected("malformed", str(refused)) from None

    def full(self, asked: Asked) -> bool:
        return asked.like.counts and self.complete()

    def missing(self, asked: Asked) -> None:
        if asked.like.counts or not self.complete():
            super().missing(asked)

    def reject(self, asked: Asked, rejected: Rejected) -> None:
        super().reject(asked, rejected)
        if not asked.like.counts:
            self.count["clients/rejected"] -= 1
            self.count[f"clients/rejected/{rejected.reason}"] -= 1
            self.count["replies/missing"] += 1


class SecureRounds:
    def __init__(self, nodes: Nodes):
        self.nodes = nodes
        self.adverts: dict[int, Advert] = {}  # of nodes, for their next round
        self.prepared: Prepared | None = None
        self.tries = 0  # rosters so far: a round may need a second one

    def round(self, t: int) -> "SecureRound":
        """A round whose clients have shared."""
        now = SecureRound(self, t)
        prepared, self.prepared = self.prepared, None
        if prepared is None or prepared.t != t or not enough(prepared.groups):
            cohorts = self.nodes.cohorts(t)
            now.advertise(cohorts)
            prepared = now.share(cohorts)
        now.prepared = prepared
        return now


def enough(groups: list[Group]) -> bool:
    return all(len(g.round.boxes) >= max(g.round.threshold, LEAST) for g in groups)


class SecureRound:
    def __init__(self, rounds: SecureRounds, t: int):
        self.rounds, self.nodes, self.t = rounds, rounds.nodes, t
        self.prepared = Prepared(t, [], [])
        self.stages: list[Stage] = []
        self.codings: list[Coding] = []
        self.short: list[str] = []
        self.next: list[list[Node]] = []

    # Keys and shares

    def _stage(self, seconds: float, wanted: Callable[[], bool] = lambda: False) -> Stage:
        stage = Stage(self.nodes, self.t, wanted)
        stage.begin(min(seconds, self.nodes.d.round_deadline))
        self.stages.append(stage)
        return stage

    def advertise(self, cohorts: list[list[Node]]) -> None:
        stage = self._stage(PATIENCE)
        self._ask_keys(stage, cohorts, counts=True)
        stage.pull()

    def _ask_keys(self, stage: Stage, cohorts: list[list[Node]], counts: bool) -> None:
        for j, nodes in enumerate(cohorts):
            for place, node in enumerate(nodes):
                if node.id not in self.rounds.adverts:
                    job = Job(SMALL, partial(self._keep_advert, node), counts)
                    request = RecordDict({RECORD: ConfigRecord({"advertise": True})})
                    stage.ask(Asked(node, j, place, job), "query", request)

    def _keep_advert(self, node: Node, content: RecordDict) -> None:
        """Every other client would refuse a roster with a key that is none."""
        advert = parsed(_bytes(content, "advert"), Advert)
        if advert.seal == advert.mask:
            raise Refused("the same key twice.")
        for key in (advert.seal, advert.mask):
            keys.agreed(PROBE, key)
        self.rounds.adverts[node.id] = advert

    def _rosters(self, cohorts: list[list[Node]]) -> list[Group]:
        groups, self.rounds.tries = [], self.rounds.tries + 1
        for nodes in cohorts:
            there = [node for node in nodes if node.id in self.rounds.adverts]
            run = str(self.nodes.link.run_id())
            adverts = [self.rounds.adverts.pop(node.id) for node in there]
            used = Counter(key for a in adverts for key in (a.seal, a.mask))
            own = [i for i, a in enumerate(adverts) if used[a.seal] == used[a.mask] == 1]
            own.sort(key=lambda i: adverts[i].seal)  # a client refuses any other order
            there, adverts = [there[i] for i in own], [adverts[i] for i in own]
            groups.append(Group(there, Round(run, self.rounds.tries, adverts)))
        return groups

    def share(self, cohorts: list[list[Node]]) -> Prepared:
        groups = self._rosters(cohorts)
        stage = self._stage(PATIENCE)
        for j, group in enumerate(groups):
            for place, node in enumerate(group.nodes):
                request = RecordDict({RECORD: ConfigRecord({"roster": group.round.roster(place)})})
                job = Job(SMALL, partial(self._take_boxes, group, place), True)
                stage.ask(Asked(node, j, place, job), "query", request)
        stage.pull()
        return Prepared(self.t, cohorts, groups)

    def _take_boxes(self, group: Group, place: int, content: RecordDict) -> None:
        group.round.take_boxes(place, _bytes(content, "boxes"))
        self._keep_advert(group.nodes[place], content)

    # Training

    def push(
        self, broadcasts, told, rates: Mapping[str, float],
        coding: Callable[[int, Any, int], Coding], next_cohorts: list[list[Node]],
    ) -> None:  # fmt: skip
        """`coding`: population, what it is told, clients -> the form of its vectors. Asks for the
        keys of the next round's clients, too."""
        self.next = next_cohorts
        stage = self._stage(self.nodes.d.round_deadline, self._trained)
        tasks, deliveries = [], []
        for j, group in enumerate(self.prepared.groups):
            broadcast, told_j = jax.tree.map(np.asarray, (broadcasts[j], told[j]))
            tasks.append(task(self.t, broadcast, {}, told_j, rates, self.nodes.frozen))
            self.codings.append(coding(j, told_j, max(1, len(group.nodes))))
            try:
                boxes = group.round.deliver(self.codings[j].layout, digest(tasks[j]))
                deliveries.append(boxes)
            except TooFew as few:
                self.short.append(f"'{stage.name(j)}': {few}")
        if self.short:
            return
        for j, boxes in enumerate(deliveries):
            self._send(stage, j, tasks[j], boxes)
        self._ask_keys(stage, next_cohorts, counts=False)

    def _send(self, stage: Stage, j: int, what: RecordDict, boxes: dict[int, bytes]) -> None:
        group, coding = self.prepared.groups[j], self.codings[j]
        most = bounds([("masked", ring.size(coding.layout))])
        most = most._replace(text=most.text + 1024)
        for place, delivery in boxes.items():
            request = ConfigRecord({**coding.asked._asdict(), "boxes": delivery})
            job = Job(most, partial(self._take_masked, group, place), True)
            content = RecordDict({**what, RECORD: request})
            stage.ask(Asked(group.nodes[place], j, place, job), "train", content)

    def _wanted(self, j: int, group: Group) -> int:
        return max(min(self.nodes.wanted[j], len(group.nodes)), group.round.threshold)

    def _trained(self) -> bool:
        groups = enumerate(self.prepared.groups)
        return all(len(g.round.alive) >= self._wanted(j, g) for j, g in groups)

    def _take_masked(self, group: Group, place: int, content: RecordDict) -> None:
        if "stale" in content:
            raise Rejected("stale", "it holds other rows now, and is asked for them again")
        record = content.get("masked")
        array = record.get("masked") if isinstance(record, ArrayRecord) else None
        if not isinstance(array, Array) or array.stype != FORMAT:
            raise Rejected("malformed", "it sent no masked vector")
        group.round.take_masked(place, array.data)
        self.stages[-1].count["clients/accepted"] += 1
        node = group.nodes[place]
        self.nodes.good(node)

    def pull(self) -> None:
        if self.short:
            return
        self.stages[-1].pull()
        for j, group in enumerate(self.prepared.groups):
            found, least = len(group.round.alive), max(self.nodes.least[j], group.round.threshold)
            if found < least:
                asked = len(self.prepared.cohorts[j])
                self.short.append(f"{found} of {asked} clients of '{self.stages[-1].name(j)}'")

    # Unmasking, and the next round's shares

    def unmask(self) -> list[ring.Vector]:
        """The sums of all populations. With fewer shares than that needs, none: see `short`."""
        following = self._rosters(self.next)
        if any(len(g.nodes) < LEAST for g in following):
            following = []
        groups = self.prepared.groups
        stage = self._stage(PATIENCE)
        requests: dict[int, tuple[Asked, dict[str, Any], list[Callable]]] = {}

        def add(node: Node, j: int, place: int, name: str, value: bytes, take: Callable) -> None:
            first = requests.setdefault(node.id, (Asked(node, j, place, None), {}, []))
            first[1][name] = value
            first[2].append(take)

        for j, group in enumerate(groups):
            alive = group.round.survivors()
            for place in sorted(group.round.alive):
                take = partial(_take_shares, group, place)
                add(group.nodes[place], j, place, "survivors", alive, take)
        for j, group in enumerate(following):
            for place, node in enumerate(group.nodes):
                roster = group.round.roster(place)
                add(node, j, place, "roster", roster, partial(self._take_boxes, group, place))
        for asked, request, takers in requests.values():
            job = Job(SMALL, partial(_take_all, takers), counts=False)
            content = RecordDict({RECORD: ConfigRecord(request)})
            stage.ask(asked._replace(like=job), "query", content)
        stage.pull()
        if following:
            self.rounds.prepared = Prepared(self.t + 1, self.next, following)
        return self._sums(stage)

    def _sums(self, stage: Stage) -> list[ring.Vector]:
        found = []
        for j, group in enumerate(self.prepared.groups):
            try:
                found.append(group.round.unmask())
            except TooFew as few:
                self.short.append(f"'{stage.name(j)}': {few}")
        return found

    # Counts

    def counted(self) -> dict[str, int]:
        total: dict[str, int] = {}
        for stage in self.stages:
            for name, n in stage.count.items():
                total[name] = total.get(name, 0) + n
        asked = sum(map(len, self.prepared.cohorts))
        good, bad = total.get("clients/accepted", 0), total.get("clients/rejected", 0)
        total["clients/surplus"] = max(0, asked - good - bad)
        kept = {name: n for name, n in total.items() if n or not name.startswith("clients/rej")}
        return {
            "clients/asked": asked, "clients/accepted": 0, "clients/rejected": 0,
            "clients/quarantined": self.nodes.quarantined, **kept,
            **self.nodes.frozen_bytes_sent(),
        }  # fmt: skip

    def bytes(self) -> RoundBytes:
        """Per client of the roster. The next round's shares count for this one."""
        clients = max(1, sum(len(g.nodes) for g in self.prepared.groups))
        down, up = sum(s.down for s in self.stages), sum(s.up for s in self.stages)
        return RoundBytes(down / clients, up / clients)


def _take_all(takers: list[Callable[[RecordDict], None]], content: RecordDict) -> None:
    for take in takers:
        take(content)


def _take_shares(group: Group, place: int, content: RecordDict) -> None:
    group.round.take_revealed(place, _bytes(content, "shares"))


def _bytes(content: RecordDict, name: str) -> bytes:
    record = content.get(RECORD)
    value = record.get(name) if isinstance(record, ConfigRecord) else None
    if not isinstance(value, bytes):
        raise Rejected("malformed", f"it sent no {name}")
    return value
