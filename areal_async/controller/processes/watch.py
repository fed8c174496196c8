"""Who holds up the run: along the waits of all processes, from the trainer to the one that nobody else explains.

Pure. The walk ends at a process that says nothing any more, at a thing that waits for nothing known (a server without
a token, a workflow's own code, a reward, a group that nobody has leased), or where it comes back to itself. A process
that is silent is the culprit wherever the walk meets it, as its last words are out of date.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from areal_async.controller.processes.reports import ProcessReport
from areal_async.telemetry import wait_graph
from areal_async.telemetry.wait_graph import BROKER, CONTROLLER, TRAINER, WaitRecord, kind_of

MAX_SILENCE_S = 10.0
"""Everybody speaks every second."""
MIN_SILENCE_S = 2.5
FINISHED = "finished"
"""The trainer's state once nothing is left for it to do."""
STARTING = "starting"
"""The trainer's state, and a server's fence, before either can work."""


class StallVerdict(NamedTuple):
    """Who holds up the run."""

    culprit: str
    """An entity of ``waits``; several that wait for each other are joined by commas."""
    chain: list[str]
    """Entities from the one that the run waits for to the culprit."""
    sentence: str
    is_starting: bool = False
    """The culprit has not been able to work yet; for that it has a deadline of its own."""


def silence_after(watchdog_s: float) -> float:
    """Return for how long a process may say nothing before it counts as gone."""
    return max(MIN_SILENCE_S, min(MAX_SILENCE_S, watchdog_s / 2))


def explain(processes: Mapping[str, ProcessReport], *, now_s: float, silence_s: float) -> StallVerdict:
    """Name the culprit, from what each process said last and when."""
    return _Walk(processes, now_s=now_s, silence_s=silence_s).run()


class _Link(NamedTuple):
    """One step of the walk."""

    on: str
    text: str
    """What stands after ``which`` in the sentence."""
    teller: str = ""
    """The process that knows of it."""
    quiet_s: float = 0.0


class _End(NamedTuple):
    """The end of the walk."""

    culprit: str
    why: str
    """What stands after the last thing that is waited for."""
    is_starting: bool = False


class _Walk:
    def __init__(self, processes: Mapping[str, ProcessReport], *, now_s: float, silence_s: float) -> None:
        self._processes = processes
        self._now_s = now_s
        self._silence_s = silence_s
        self._chain: list[str] = []
        self._quiet_s = 0.0

    def run(self) -> StallVerdict:
        trainer = self._processes.get(TRAINER)
        entity = CONTROLLER if trainer is not None and trainer.state == FINISHED else TRAINER
        texts: list[str] = []
        found: _Link | _End = self._deafness() or self._step(entity)
        while isinstance(found, _Link):
            texts.append(found.text)
            self._quiet_s = found.quiet_s
            if self._is_silent(found.teller):
                self._chain.append(found.teller)
                found = _End(found.teller, f"as {found.teller} said last, {self._silence_text(found.teller)}")
            else:
                entity = found.on
                found = self._step(entity)
        start = self._chain[0] if self._chain else entity
        road = " ".join([start, ", which ".join(texts)]) if texts else start
        return StallVerdict(found.culprit, self._chain, f"{road}, {found.why}", found.is_starting)

    def _step(self, entity: str) -> _Link | _End:
        """Go one on from here."""
        if entity in self._chain:
            circle = self._chain[self._chain.index(entity) :]
            return _End(", ".join(circle), f"so that they wait for each other: {' -> '.join([*circle, entity])}")
        self._chain.append(entity)
        return self._missing(entity) or self._wait_of(entity) or self._behind(entity)

    def _wait_of(self, entity: str) -> _Link | None:
        """Go on with the quietest wait that this has itself."""
        links = [self._link(teller, record) for teller, record in self._all_waits() if record.waiter == entity]
        return max(links, key=lambda link: link.quiet_s, default=None)

    def _link(self, teller: str, record: WaitRecord) -> _Link:
        lease = f"is leased by {teller} and " if kind_of(record.waiter) == "group" else ""
        text = f"{lease}waits for {f'{record.what} {record.on}'.strip()}"
        return _Link(record.on, text, teller, record.quiet_s + self._silent_s(teller))

    def _behind(self, entity: str) -> _Link | _End:
        """Go on from what waits for nothing that is told."""
        kind, _, name = entity.partition(" ")
        lately = f"for {self._quiet_s:.0f} s"
        match kind:
            case "group" | "evaluation":
                return self._behind_group(entity)
            case "room":
                return self._behind_room(name.removeprefix("on "))
            case "server":
                why = f"where nothing has moved {lately}{self._server_text(name)}"
                return _End(entity, why, is_starting=STARTING in self._fences(name))
            case "weights" if not any(heard.servers for heard in self._processes.values()):
                return _End(entity, "and there is no server to hold it yet", is_starting=True)
            case "weights" if laggard := self._laggard(name):
                return _Link(laggard, f"waits for {laggard} to hold it", quiet_s=self._quiet_s)
            case "step" | "checkpoint" | "weights" | "publication":
                late = next((one for one in self._processes if one.startswith("rank ") and self._is_silent(one)), None)
                return _Link(late, f"waits for {late}", quiet_s=self._quiet_s) if late else self._busy(lately)
            case "slot" | "row":
                return _End(entity, f"whose own code has waited for nothing known {lately}")
        if entity in self._processes:
            state = self._processes[entity].state
            return _End(entity, f"which says of itself: {state}", is_starting=state == STARTING)
        return _End(entity, f"where nothing has moved {lately}")

    def _busy(self, lately: str) -> _End:
        """End at the process that does what comes last on the way."""
        actor = next((one for one in reversed(self._chain) if one in self._processes), self._chain[-1])
        return _End(actor, f"at which {actor} has been {lately}")

    def _behind_group(self, entity: str) -> _Link | _End:
        """Say who has a group that waits for nothing that is told, or why nobody has."""
        for teller, record in self._all_waits():
            if record.on == entity and record.waiter == teller and kind_of(teller) == "node":
                return _End(entity, f"which {teller} has leased and neither begun nor acknowledged")
        nodes = {name: heard for name, heard in self._processes.items() if kind_of(name) == "node"}
        if silent := next(filter(self._is_silent, nodes), None):
            return _Link(silent, f"is leased by no node that speaks and may be on {silent}")
        for name, heard in nodes.items():
            if heard.waits.num_left_out:
                return _End(entity, f"which may be one of {heard.waits.num_left_out} that {name} has left out")
        for name, heard in nodes.items():
            for record in heard.waits.records:
                if record.waiter == name and kind_of(record.on) in ("server", "room"):
                    text = f"nobody has leased, as {name} waits for {record.what} {record.on}"
                    return _Link(record.on, text, name, record.quiet_s)
        if not nodes:
            return _End(entity, "and there is no node to lease it yet", is_starting=True)
        return _End(entity, f"which nobody has leased, though {', '.join(nodes)} would")

    def _behind_room(self, node: str) -> _Link | _End:
        if node not in self._processes:  # a process that tells of waits may name any
            return _End(self._chain[-1], "a node that has not been heard")
        waits = [one for one in self._processes[node].waits.records if one.waiter == node]
        records = [one for one in waits if kind_of(one.on) == "group"]
        if not records:
            return _End(node, "which runs as much as it may")
        quietest = max(records, key=lambda one: one.quiet_s)
        return _Link(quietest.on, f"is full of others, as {quietest.on}", node, quietest.quiet_s)

    def _deafness(self) -> _End | None:
        """End at the broker when the controller does not hear what it says itself."""
        if not self._is_silent(CONTROLLER):
            return None
        self._chain.append(BROKER)
        silent_s = self._silent_s(CONTROLLER)
        return _End(BROKER, f"over which the controller's own reports have not come back for {silent_s:.0f} s")

    def _missing(self, entity: str) -> _Link | _End | None:
        """End at a process that is not there, or go on to the one that keeps a server and is not there."""
        if entity == TRAINER and TRAINER not in self._processes:
            return _End(TRAINER, "which has not been heard yet", is_starting=True)
        if self._is_silent(entity):
            return _End(entity, self._silence_text(entity))
        kind, _, server_id = entity.partition(" ")
        if kind == "server":
            keeper = next((name for name, heard in self._processes.items() if server_id in heard.servers), "")
            if self._is_silent(keeper):
                return _Link(keeper, f"is kept by {keeper}", quiet_s=self._quiet_s)
        return None

    def _laggard(self, version: str) -> str | None:
        """Return a server that does not hold a version which all are to hold."""
        servers = (pair for heard in self._processes.values() for pair in heard.servers.items())
        behind = (name for name, one in servers if one.get("version") != version and not one.get("frozen"))
        return next(map(wait_graph.server, behind), None)

    def _server_text(self, server_id: str) -> str:
        updates = [
            f"being given {record.waiter} for {record.age_s:.0f} s"
            for _, record in self._all_waits()
            if record.on == wait_graph.server(server_id) and record.waiter.startswith("weights ")
        ]
        return "".join(f", {text}" for text in [*self._fences(server_id), *updates])

    def _fences(self, server_id: str) -> list[str]:
        """Return why a server is not in use; nothing when it is."""
        servers = [heard.servers[server_id] for heard in self._processes.values() if server_id in heard.servers]
        return [str(server["fence"]) for server in servers if server.get("fence")]

    def _all_waits(self) -> Iterator[tuple[str, WaitRecord]]:
        for name, heard in self._processes.items():
            for record in heard.waits.records:
                yield name, record

    def _is_silent(self, name: str) -> bool:
        return name in self._processes and self._silent_s(name) > self._silence_s

    def _silent_s(self, name: str) -> float:
        return max(0.0, self._now_s - self._processes[name].heard_s)

    def _silence_text(self, name: str) -> str:
        return f"which has not been heard for {self._silent_s(name):.0f} s"
