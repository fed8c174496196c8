"""What the user sees of a run, as data: fed by the run's files and by what the roles say on the bus.

Steps and evaluations come from the files, so that none is missed and a resumed run shows its history; the
present comes from the metrics subjects, where a lost message costs a second.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_async.bus import Report
from areal_async.config.settings import Settings
from areal_async.errors import WireError
from areal_async.monitor.token_text import visible
from areal_async.process.json_lines import JsonLines, Line, decode_object
from areal_async.protocol.types import mean
from areal_async.protocol.wire import decode_json
from areal_async.telemetry.reports import servers_in
from areal_async.versions.evaluated import answers, failures, measured

MAX_NUMBER = 1e300
"""What is told may have any number of digits, and is shown in those of a float."""
NUM_RECENT_STEPS = 10
"""Newest steps over which rewards are averaged."""
STEP_PARTS = {"waiting for data": "time_wait_data_s", "training": "time_train_s", "weights": "time_weights_s"}
"""What a step's time goes into -> its metric."""
KEPT_STEPS = 500
"""Newest lines of ``metrics.jsonl`` that are held: more than is drawn, and than a restored trainer takes back."""
MAX_REPORTS = 2048
"""Nodes that come and go have new names; of more than these the ones silent for longest are forgotten."""
TOLD = ("run.", "alarm.", "version.", "checkpoint.damaged")
"""How the kinds of events begin that are about the run as a whole."""


@dataclass(slots=True, kw_only=True)
class RunFigures:
    """The newest steps of a run, and what its processes said last; pure."""

    steps: deque[Line] = field(default_factory=lambda: deque(maxlen=KEPT_STEPS))
    """The newest lines of ``metrics.jsonl``, oldest first."""
    reports: dict[tuple[str, str], Report] = field(default_factory=dict)
    """What each process said last, by role and instance."""

    @property
    def newest_step(self) -> Line:
        """The newest line; empty before the first step."""
        return self.steps[-1] if self.steps else {}

    @property
    def step(self) -> int:
        """The step that the newest line ends; 0 before the first."""
        return int(number(self.newest_step, "step"))

    @property
    def controller(self) -> Report:
        return self.reports.get(("controller", "0"), {})

    @property
    def nodes(self) -> dict[str, Report]:
        """What every node said, by its id."""
        return {instance: report for (role, instance), report in sorted(self.reports.items()) if role == "node"}

    @property
    def servers(self) -> dict[str, dict[str, Any]]:
        """Every inference server by its id, as its node described it last."""
        return {name: server for node in self.nodes.values() for name, server in servers_in(node).items()}

    def sum_of_nodes(self, key: str) -> float:
        """Return a number of all nodes together, as they said last."""
        return sum(number(node, key) for node in self.nodes.values())

    def mean_reward(self, num_steps: int) -> float:
        """Return the mean over the newest steps."""
        return mean([number(line, "reward_mean") for line in list(self.steps)[-num_steps:]])


@dataclass(slots=True)
class RunView(RunFigures):
    """The state of one run's display."""

    settings: Settings
    evaluations: list[Line] = field(default_factory=list)
    """Lines of ``eval.jsonl``, oldest first."""
    _steps_file: JsonLines = field(init=False)
    _evaluations_file: JsonLines = field(init=False)
    _num_steps_read: int = 0

    def __post_init__(self) -> None:
        self._steps_file = JsonLines(self.settings.run_directory / "metrics.jsonl")
        self._evaluations_file = JsonLines(self.settings.run_directory / "eval.jsonl")

    def read_files(self) -> tuple[list[Line], list[Line]]:
        """Take in what the files have gained; return the steps and evaluations that are new."""
        news = self._steps_file.read_new()
        for _ in range(min(len(self.steps), self._num_steps_read - news.num_kept)):
            self.steps.pop()
        self._num_steps_read = news.num_kept + len(news.lines)
        self.steps.extend(news.lines)
        evaluations = self._evaluations_file.read_new().lines
        self.evaluations += evaluations
        return news.lines, evaluations

    def on_metrics(self, subject: str, data: bytes) -> None:
        """Take in one message on ``areal.<run>.metrics.<role>.<instance>``; what is no message of ours is ignored."""
        try:
            message = decode_json(data, dict[str, Any], what=subject)  # no NaN, which is no number of anything
        except WireError:
            return
        role, _, instance = subject.split(".", 3)[-1].partition(".")
        if role == "node":
            node = role, str(message.get("node_id", instance))
            self.reports.pop(node, None)  # at the end then: those in front have been silent for longest
            self.reports[node] = message
            if len(self.reports) > MAX_REPORTS:
                del self.reports[next(one for one in self.reports if one[0] == role)]
        elif role == "controller" or (role == "trainer" and "state" in message):  # a step comes from the file
            self.reports[role, "0"] = message

    @property
    def roles(self) -> dict[str, str]:
        """``node 0`` -> what it does, and what it waits for."""
        return {
            f"node {instance}" if role == "node" else role: _state_of(role, report)
            for (role, instance), report in self.reports.items()
        }

    @property
    def alarms(self) -> list[str]:
        """Names of what the newest step, or the want of one, shows to be wrong with learning."""
        said = (self.newest_step, self.controller)
        return [name for one in said for name in str(one.get("alarm_names", "")).split()]


def by_task(evaluations: Sequence[Line], settings: Settings) -> dict[str, list[Line]]:
    """Part evaluations by workflow; where a run has a single one, under an empty name."""
    if len(settings.tasks) < 2:
        return {"": list(evaluations)}
    names = [task.name for task in settings.tasks]
    parts = {name: [line for line in evaluations if line.get("workflow") == name] for name in names}
    return {name: part for name, part in parts.items() if part}


def notice_text(subject: str, data: bytes) -> str | None:
    """Return one line about an event of the run as a whole; the others are shown elsewhere, or at ``status``.

    No node speaks for the run as a whole.
    """
    message = None if subject.split(".")[3] == "node" else decode_object(data)
    if message is None or not str(message.get("event", "")).startswith(TOLD):
        return None
    return event_text(message)


def event_text(event: Mapping[str, Any]) -> str:
    """Return one line about an event, safe to show on a terminal; of one that is told in a sentence, that."""
    return visible(_event_text(event), newline=" ")


def _event_text(event: Mapping[str, Any]) -> str:
    kind = str(event.get("event", ""))
    if "sentence" in event:
        since = f" for {number(event, 'quiet_s'):.0f} s" if "quiet_s" in event else ""
        return f"{kind}{since}: {event['sentence']}"
    if kind == "checkpoint.damaged":
        return f"{kind}: {event.get('version')}: {event.get('reason')}; set aside, going on from {event.get('taken')}"
    unsaid = ("event", "at", "teller", "is_graded")
    values = {key: value for key, value in event.items() if key not in unsaid and value != ""}
    if event.get("is_graded"):
        values = {"mean_reward" if key == "accuracy" else key: value for key, value in values.items()}
    if kind.partition(".")[0] in ("role", "server"):
        return " ".join([kind, *(str(value) for value in _named_first(values))])
    return " ".join([kind, *(f"{key}={value}" for key, value in values.items())])


def _named_first(values: Mapping[str, Any]) -> Iterator[Any]:
    """Yield what an event is about, then why; its numbers are for machines."""
    yield from (values[key] for key in ("crew", "server_id", "version") if values.get(key))
    yield from (f"({values[key]})" for key in ("reason", "failure") if values.get(key))
    if "away_s" in values:
        yield f"after {number(values, 'away_s'):.1f} s"


def number(line: Mapping[str, Any], key: str) -> float:
    """Return a number of a line; 0 when it is missing, something else or beyond all bounds."""
    value = line.get(key, 0)
    return float(value) if isinstance(value, int | float) and not abs(value) > MAX_NUMBER else 0.0


def trained_tokens_per_s(line: Line) -> float:
    """Tokens through the loss per second of training."""
    seconds = number(line, "time_train_s")
    return number(line, "num_tokens") / seconds if seconds > 0 else 0.0


def reward_text(figures: RunFigures) -> str:
    """Return the reward of the newest step, and the mean of the last few."""
    newest, num_recent = number(figures.newest_step, "reward_mean"), min(NUM_RECENT_STEPS, len(figures.steps))
    return f"{newest:.3f}, last {num_recent}: {figures.mean_reward(num_recent):.3f}"


def step_text(line: Line, view: RunView) -> str:
    """Return the one line that a step is without a terminal."""
    return (
        f"step {int(number(line, 'step'))}/{view.settings.run.steps}"
        f" reward {number(line, 'reward_mean'):.3f}"
        f" staleness {number(line, 'staleness_mean'):.1f}/{int(number(line, 'staleness_max'))}"
        f" loss {number(line, 'loss'):.4f} grad {number(line, 'grad_norm'):.3f}"
        f" gap {number(line, 'logprob_gap_mean'):.4f}"
        f" {number(line, 'time_step_s'):.1f} s (wait {number(line, 'time_wait_data_s'):.1f}"
        f" train {number(line, 'time_train_s'):.1f} weights {number(line, 'time_weights_s'):.1f})"
        f" gen {view.sum_of_nodes('tokens_per_s'):.0f} tok/s train {trained_tokens_per_s(line):.0f} tok/s"
    )


def evaluation_text(line: Line, view: RunView) -> str:
    """Return the one line that an evaluation is without a terminal."""
    of_task = f", {line.get('workflow')}" if len(view.settings.tasks) > 1 else ""
    return (
        f"eval of version {line.get('eval_id', '?')}{of_task}: {measured(line)}"
        f" over {int(number(line, 'num_scored'))} {answers(line)}{failures(line)}"
    )


def _state_of(role: str, report: Report) -> str:
    state, waits_for = str(report.get("state", "")), str(report.get("waits_for") or "")
    if role == "node":
        running, groups, waiting = (
            int(number(report, f"num_{what}"))
            for what in ("trajectories_running", "groups_running", "groups_waiting_for_stream")
        )
        state = f"{running} trajectories of {groups} groups running"
        waits_for = f"room in the stream with {waiting} groups" if waiting else ""
    return f"{state}, waits for {waits_for}" if waits_for else state
