"""What the weights of the first step wait for: the evaluation of those before it, which is to speak of them alone.

The controller admits too few groups for a second step before that is over (``controller/evaluation_schedule.py``), so
nothing else waits for it: the first step is trained beside it.
"""

from collections.abc import Collection

import anyio

from areal_async.bus import Bus
from areal_async.config.settings import Settings
from areal_async.protocol.types import Version
from areal_async.telemetry import wait_graph

POLL_S = 0.05


class FirstEvaluation:
    """The evaluation that begins with step 0, as rank 0 sees it."""

    def __init__(self, bus: Bus, tasks: Collection[str]) -> None:
        """``tasks``: those that are evaluated, by name."""
        self._bus = bus
        self._keys = {bus.names.evaluation_key(0, task) for task in tasks}
        self._is_over = not tasks

    @classmethod
    def of_run(cls, bus: Bus, settings: Settings) -> "FirstEvaluation":
        """Return that of a run; of one without held-out rows it is over."""
        return cls(bus, [task.name for task, *_ in settings.held_out])

    def holds(self, version: Version) -> bool:
        """Say whether a version may be announced only when it is over; not where it is the first of its lineage."""
        return version.step == 1 and not self._is_over

    def give_up(self) -> None:
        """Wait for it no longer: this trainer is to stop."""
        self._is_over = True

    async def over(self, *, of: str, before: Version) -> None:
        """Wait until each task has its record of version ``of``, so that ``before`` may be announced, or for a stop."""
        with wait_graph.on(wait_graph.evaluation(of), waiter=wait_graph.publication(str(before))):
            while not self._is_over:
                made = await self._bus.keys(*self._keys)
                self._is_over = self._is_over or self._keys <= set(made)
                if not self._is_over:
                    await anyio.sleep(POLL_S)
