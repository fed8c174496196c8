"""What ``top`` shows, as data: the newest answers of everybody, and what they have said since it was started.

Pure: fed with snapshots, asked for rows. A process that does not answer once is shown with its last answer, until that
is too old to tell of the present.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from areal_async.bus import Report
from areal_async.monitor.snapshot import ENDED, OVER, Status
from areal_async.monitor.top.rows import (
    EVENT_COLUMNS,
    LEASE_COLUMNS,
    PROCESS_COLUMNS,
    SERVER_COLUMNS,
    TASK_COLUMNS,
    WAIT_COLUMNS,
    Column,
    PaneRows,
    Told,
    event_rows,
    lease_rows,
    process_rows,
    server_rows,
    task_names,
    task_rows,
    tasks_of,
    wait_rows,
)
from areal_async.monitor.view import number
from areal_async.process.json_lines import Line
from areal_async.telemetry.wait_graph import WaitRecord, WaitReport

PANES = ("processes", "servers", "waits", "leases", "events", "tasks")
"""The last only of a run that has several."""
SORTS = {
    "processes": ("trouble", "name", "lag", "starts"),
    "servers": ("trouble", "name", "load", "tokens/s", "version"),
    "waits": ("quiet", "age", "waiter"),
    "leases": ("age", "node", "quiet"),
    "events": ("newest", "oldest"),
    "tasks": ("order", "share", "reward"),
}
COLUMNS = {
    "processes": PROCESS_COLUMNS,
    "servers": SERVER_COLUMNS,
    "waits": WAIT_COLUMNS,
    "leases": LEASE_COLUMNS,
    "events": EVENT_COLUMNS,
    "tasks": TASK_COLUMNS,
}
KEPT_S = 2.5
"""How long an answer stands for a process that gives no newer one."""
MAX_STEPS = 500
MAX_EVENTS = 500
RATE_OVER_S = 10.0
NO_BROKER = "no broker"


@dataclass(slots=True)
class TopView:
    """One run, as it is now and was of late."""

    steps: deque[Line] = field(default_factory=lambda: deque(maxlen=MAX_STEPS))
    """Lines of the newest steps, oldest first."""
    events: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    """What has happened last, oldest first."""
    status: Status | None = None
    reports: dict[tuple[str, str], Report] = field(default_factory=dict)
    pane: int = 0
    sorts: dict[str, int] = field(default_factory=dict)
    filter: str = ""
    """Only rows with this text in them are shown, whether its letters are large or small."""
    trouble: str = ""
    """Why nothing is known yet."""
    _heard_s: dict[tuple[str, str], float] = field(default_factory=dict)
    _scored: deque[tuple[float, float]] = field(default_factory=deque)
    _sorted_waits: dict[str, PaneRows[Told]] = field(default_factory=dict)
    """Pane and sort -> what is told, as of the newest answers: thousands of rows, drawn more often than told."""

    # being fed

    def hear(self, reports: Mapping[tuple[str, str], Report], *, now_s: float) -> dict[tuple[str, str], Report]:
        """Take in what the processes have just answered; return that, and what those who were late said last."""
        for key, report in reports.items():
            self.reports[key], self._heard_s[key] = report, now_s
        for key in [key for key, heard_s in self._heard_s.items() if now_s - heard_s > KEPT_S]:
            del self.reports[key], self._heard_s[key]
        self._sorted_waits.clear()
        told = self.reports.get(("trainer", "0"), {}).get("last_step")
        if isinstance(told, dict):
            self.add_step(told)
        self._scored.append((now_s, sum(number(one, "num_scored") for one in self.nodes.values())))
        while now_s - self._scored[0][0] > RATE_OVER_S:
            self._scored.popleft()
        return self.reports

    def add_step(self, line: Line) -> None:
        """Take in a step's line; one that is trained again after a crash replaces the first."""
        while self.steps and number(self.steps[-1], "step") >= number(line, "step"):
            self.steps.pop()
        self.steps.append(line)

    def lose_broker(self, reason: str) -> None:
        """Note that nobody can be asked; what was said last stays in sight, and is said to be old."""
        self.trouble = reason
        if self.status is not None and self.status.state not in OVER:
            note = f"the broker does not answer ({reason}); what stands here was said before"
            self.status = replace(self.status, state=NO_BROKER, notes=[note])

    def end(self) -> None:
        """Note that the run has ended: nobody is missed any more."""
        if self.status is not None:
            state, reason = self.status.state, self.status.reason
            if state not in ("finished", "failed"):  # it ended unseen, or was stopped
                state, reason = "ended", f"status --run {self.status.run} tells how"
            members = [replace(one, presence=ENDED, state="", waits_for="") for one in self.status.members]
            self.status = replace(self.status, state=state, reason=reason, members=members, servers=[], notes=[])
        self.reports.clear()
        self._sorted_waits.clear()
        self._heard_s.clear()
        self._scored.clear()

    # what is chosen

    @property
    def panes(self) -> tuple[str, ...]:
        """Names of those that there are."""
        shares = self.status.shares if self.status is not None else {}
        return PANES if task_names(self.steps, shares) else PANES[:-1]

    @property
    def pane_name(self) -> str:
        return self.panes[min(self.pane, len(self.panes) - 1)]

    @property
    def sort_name(self) -> str:
        return SORTS[self.pane_name][self.sorts.get(self.pane_name, 0)]

    def sort_next(self) -> None:
        """Sort the pane by its next column."""
        self.sorts[self.pane_name] = (self.sorts.get(self.pane_name, 0) + 1) % len(SORTS[self.pane_name])

    # what is to be seen

    @property
    def step(self) -> int:
        """The newest that is known."""
        told = int(number(self.steps[-1], "step")) if self.steps else 0
        return told or (self.status.step if self.status is not None else 0)

    @property
    def nodes(self) -> dict[str, Report]:
        """Every node's answer, by its id."""
        return {instance: one for (role, instance), one in self.reports.items() if role == "node"}

    @property
    def controller(self) -> Report:
        return self.reports.get(("controller", "0"), {})

    @property
    def trajectories_per_s(self) -> float:
        """Scored by all nodes, over the last seconds; a node that was started again counts from nothing."""
        if not self._scored:
            return 0.0
        (first_s, first), (last_s, last) = self._scored[0], self._scored[-1]
        return max(0.0, last - first) / (last_s - first_s) if last_s > first_s else 0.0

    @property
    def tokens_by_age(self) -> dict[int, float]:
        """Age -> trained tokens, of the newest step."""
        line = self.steps[-1] if self.steps else {}
        prefix = "staleness_tokens/"
        ages = [name.removeprefix(prefix) for name in line if name.startswith(prefix)]
        return {int(age): number(line, prefix + age) for age in ages if age.isdecimal()}

    @property
    def columns(self) -> tuple[Column, ...]:
        """Those of the pane."""
        return COLUMNS[self.pane_name]

    def rows(self) -> PaneRows[Any]:
        """Return the rows of the pane that pass the filter, sorted as is wanted."""
        rows = self._all_rows()
        return rows.having(self.filter) if self.filter else rows

    def _all_rows(self) -> PaneRows[Any]:
        if self.status is None:
            return process_rows((), self.sort_name)
        match self.pane_name:
            case "processes":
                return process_rows(self.status.members, self.sort_name)
            case "servers":
                return server_rows(self._servers(), self.sort_name)
            case "waits" | "leases":
                return self._rows_of_waits()
            case "tasks":
                return task_rows(tasks_of(self.steps, self.status.shares, self.status.changes), self.sort_name)
        return event_rows(self.events if self.sort_name == "oldest" else reversed(self.events))

    def _servers(self) -> list[dict[str, Any]]:
        assert self.status is not None
        of_nodes: dict[str, Any] = {}
        for node in self.nodes.values():
            servers = node.get("servers")
            of_nodes.update(servers if isinstance(servers, dict) else {})
        return [{**server, **of_nodes.get(server["id"], {})} for server in self.status.servers]

    def _rows_of_waits(self) -> PaneRows[Told]:
        name = f"{self.pane_name} {self.sort_name}"
        if name not in self._sorted_waits:
            rows_of = wait_rows if self.pane_name == "waits" else lease_rows
            self._sorted_waits[name] = rows_of(self._waits(), self.sort_name)
        return self._sorted_waits[name]

    def _waits(self) -> list[Told]:
        """Return every wait that is told, with who tells it."""
        found = []
        for (role, instance), report in self.reports.items():
            name = f"{role} {instance}" if role == "node" else role
            found += [(name, record) for record in _records(report)]
        return found


def _records(report: Report) -> list[WaitRecord]:
    try:
        return msgspec.convert(report.get("waits", {}), WaitReport).records
    except msgspec.ValidationError:
        return []
