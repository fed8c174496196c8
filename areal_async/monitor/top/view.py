"""What ``top`` shows, as data: the newest answers of everybody, and what they have said since it was started.

Pure: fed with snapshots, asked for rows. A process that does not answer once is shown with its last answer, until that
is too old to tell of the present.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from areal_async.bus import Report
from areal_async.monitor.snapshot import ENDED, OVER, Status
from areal_async.monitor.top.rows import PANES, Pane, PaneRows, Told, task_names, tasks_of
from areal_async.monitor.view import RunFigures, number
from areal_async.process.json_lines import Line
from areal_async.telemetry.reports import waits_in

KEPT_S = 2.5
"""How long an answer stands for a process that gives no newer one."""
MAX_EVENTS = 500
RATE_OVER_S = 10.0
NO_BROKER = "no broker"


@dataclass(slots=True)
class TopView(RunFigures):
    """One run, as it is now and was of late."""

    events: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    """What has happened last, oldest first."""
    status: Status | None = None
    place: int = 0
    """The pane that is shown, counted from 0."""
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

    def take_reports(self, reports: Mapping[tuple[str, str], Report], *, now_s: float) -> dict[tuple[str, str], Report]:
        """Take in what the processes have just answered; return that, and what those who were late said last."""
        for key, report in reports.items():
            self.reports[key], self._heard_s[key] = report, now_s
        for key in [key for key, heard_s in self._heard_s.items() if now_s - heard_s > KEPT_S]:
            del self.reports[key], self._heard_s[key]
        self._sorted_waits.clear()
        told = self.reports.get(("trainer", "0"), {}).get("last_step")
        if isinstance(told, dict):
            self.add_step(told)
        self._scored.append((now_s, self.sum_of_nodes("num_scored")))
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
        return tuple(PANES) if task_names(self.steps, shares) else tuple(PANES)[:-1]

    @property
    def pane_name(self) -> str:
        return self.panes[min(self.place, len(self.panes) - 1)]

    @property
    def pane(self) -> Pane[Any]:
        """The pane that is shown."""
        return PANES[self.pane_name]

    @property
    def sort_name(self) -> str:
        return list(self.pane.sorts)[self.sorts.get(self.pane_name, 0)]

    def sort_next(self) -> None:
        """Sort the pane by its next column."""
        self.sorts[self.pane_name] = (self.sorts.get(self.pane_name, 0) + 1) % len(self.pane.sorts)

    # what is to be seen

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
        line = self.newest_step
        prefix = "staleness_tokens/"
        ages = [name.removeprefix(prefix) for name in line if name.startswith(prefix)]
        return {int(age): number(line, prefix + age) for age in ages if age.isdecimal()}

    def rows(self) -> PaneRows[Any]:
        """Return the rows of the pane that pass the filter, sorted as is wanted."""
        rows = self._all_rows()
        return rows.having(self.filter) if self.filter else rows

    def _all_rows(self) -> PaneRows[Any]:
        name = self.pane_name
        if name in ("waits", "leases"):
            key = f"{name} {self.sort_name}"
            if key not in self._sorted_waits:
                self._sorted_waits[key] = self.pane.rows(self._waits(only_leases=name == "leases"), self.sort_name)
            return self._sorted_waits[key]
        return self.pane.rows(self._items(name), self.sort_name)

    def _items(self, name: str) -> Iterable[Any]:
        if self.status is None:
            return ()
        match name:
            case "processes":
                return self.status.members
            case "servers":
                of_nodes = self.servers
                return [{**server, **of_nodes.get(server["id"], {})} for server in self.status.servers]
            case "tasks":
                return tasks_of(self.steps, self.status.shares, self.status.changes)
        return self.events if self.sort_name == "oldest" else reversed(self.events)

    def _waits(self, *, only_leases: bool) -> Iterator[Told]:
        """Yield every wait that is told, with who tells it; a group is leased by the node that tells of it."""
        for (role, instance), report in self.reports.items():
            name = f"{role} {instance}" if role == "node" else role
            for record in waits_in(report).records:
                if not only_leases or (role == "node" and record.waiter.startswith("group ")):
                    yield name, record
