"""Named points at which a test ends or stops this very process. Without ``AREAL_FAULTS`` they do nothing.

    AREAL_FAULTS="trainer.after_step:3:kill node.before_ack:5:stop" AREAL_FAULTS_FIRED=/tmp/fired

ends the trainer at its third step and stops the node at its fifth ack. Each entry fires once for all processes
that share the folder ``AREAL_FAULTS_FIRED``, and leaves a file there first: one that is started again is spared.
"""

import os
import signal
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from areal_async.errors import PipelineError

SPECIFICATION = "AREAL_FAULTS"
FIRED = "AREAL_FAULTS_FIRED"
ACTIONS = ("kill", "stop", "raise")


class Fault(NamedTuple):
    """What is to happen at a point, once."""

    point: str
    occurrence: int
    """How many times one process has come by the point, counted from 1."""
    action: str
    """``kill`` and ``stop`` are SIGKILL and SIGSTOP to the process itself, ``raise`` a PipelineError."""


def parse_faults(text: str) -> dict[str, list[Fault]]:
    """Read ``point:occurrence:action`` entries, separated by blanks; by point.

    Raises:
        ValueError: an entry is none.
    """
    faults: dict[str, list[Fault]] = {}
    for entry in text.split():
        point, occurrence, action = entry.split(":")
        if action not in ACTIONS or not occurrence.isdecimal():
            raise ValueError(f"{SPECIFICATION}: got {entry!r}, need point:occurrence:action with one of {ACTIONS}")
        faults.setdefault(point, []).append(Fault(point, int(occurrence), action))
    return faults


class FaultPoints:
    """The faults that are armed in one process, and how often it has come by their points."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._faults = parse_faults(environment.get(SPECIFICATION, ""))
        self._fired = Path(environment.get(FIRED, "."))
        self._num_reached: Counter[str] = Counter()

    def reach(self, point: str) -> None:
        """Carry out what is armed here. One look-up when nothing is.

        Raises:
            PipelineError: the fault's action is ``raise``.
        """
        faults = self._faults.get(point)
        if faults is None:
            return
        self._num_reached[point] += 1
        for fault in faults:
            if fault.occurrence == self._num_reached[point] and self._is_first(fault):
                _carry_out(fault)

    def _is_first(self, fault: Fault) -> bool:
        self._fired.mkdir(parents=True, exist_ok=True)
        try:
            (self._fired / f"{fault.point}-{fault.occurrence}-{fault.action}").touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def _carry_out(fault: Fault) -> None:
    if fault.action == "raise":
        raise PipelineError(f"fault point {fault.point}: reached {fault.occurrence} times")
    os.kill(os.getpid(), signal.SIGKILL if fault.action == "kill" else signal.SIGSTOP)


failpoint = FaultPoints(os.environ).reach
