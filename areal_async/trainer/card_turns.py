"""The trainer's turns on the GPUs that it shares with servers (``inference.colocate: release``); rank 0's.

    say that it has them -> every server says that it is out of the way -> the step -> say that it has them no more

While it has them nothing is generated, so the clock that groups are waited for by stands still. Whatever ends a turn,
the servers go on: at its end it says so; killed, it says nothing any more, and its hold runs out or is ended by the
next trainer's first word.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio
import structlog

from areal_async.bus import Bus
from areal_async.config.settings import InferenceSettings
from areal_async.errors import BusError, PipelineError
from areal_async.inference.card import BEAT_S
from areal_async.process.bell import Bell
from areal_async.process.failpoints import failpoint
from areal_async.process.pausable_clock import PausableClock
from areal_async.protocol.run_state import CardHold, ServerState
from areal_async.protocol.types import Version
from areal_async.telemetry import wait_graph
from areal_async.trainer.batch.lineage import Lineage

SERVER_POLL_S = 0.1
LAST_WORD_DEADLINE_S = 5.0
SLACK_S = 60.0
"""For servers to give way, beyond the most that one may take to start: it is asked when it has."""

log = structlog.get_logger()


class CardTurns:
    """The turns of one lineage."""

    def __init__(self, bus: Bus, lineage: Lineage, settings: InferenceSettings, *, clock: PausableClock) -> None:
        """Take the clock that stands still in a turn."""
        self.hold = ""
        """Version of the step whose turn it is; empty between two turns."""
        self._bus = bus
        self._lineage = lineage
        self._deadline_s = settings.start_bound_s + SLACK_S
        self._clock = clock
        self._writing = anyio.Lock()
        self._begun = Bell()

    async def begin(self, step: int) -> None:
        """End what an older lineage has left: servers use their GPUs until the first turn."""
        await self._say(Version(self._lineage.number, step), is_held=False)

    @asynccontextmanager
    async def turn(self, step: int) -> AsyncIterator[None]:
        """Have the GPUs for a step.

        Raises:
            PipelineError: a server is not out of the way in time, or a newer lineage has been taken.
        """
        version = Version(self._lineage.number, step)
        self._clock.stop()
        try:
            await self._say(version, is_held=True)
            self.hold = str(version)
            self._begun.ring()
            await self._wait_for_servers()
            failpoint("trainer.has_cards")
            yield
        except BaseException:
            with anyio.move_on_after(LAST_WORD_DEADLINE_S, shield=True), suppress(PipelineError, BusError):
                await self._say(version, is_held=False)
            raise
        else:
            await self._say(version, is_held=False)
        finally:
            self.hold = ""
            self._clock.go()

    async def run_beats(self) -> None:
        """Say now and then that the turn lasts, for ever.

        consumes:     turns
        waits for:    the next one, or the next beat
        produces:     a hold that is not over
        unblocked by: cancellation alone
        """
        num_beats = 0
        while True:
            if not self.hold:
                num_beats = 0
                await self._begun.wait()
            await anyio.sleep(BEAT_S)
            async with self._writing:
                if self.hold:
                    num_beats += 1
                    await self._lineage.hold_cards(CardHold(version=self.hold, is_held=True, beat=num_beats))

    async def _say(self, version: Version, *, is_held: bool) -> None:
        async with self._writing:
            if not is_held:
                self.hold = ""  # no beat comes after it
            await self._lineage.hold_cards(CardHold(version=str(version), is_held=is_held))

    async def _wait_for_servers(self) -> None:
        ends_at = anyio.current_time() + self._deadline_s
        with wait_graph.PollingWaits() as waiting:
            while late := await self._late():
                waiting.replace(wait_graph.TRAINER, map(wait_graph.server, late), "the GPU of")
                if anyio.current_time() > ends_at:
                    raise PipelineError(
                        f"step {Version.parse(self.hold).step}: servers {', '.join(late)} have not given their memory "
                        f"back within {self._deadline_s:g} s; see their logs, or raise inference.start_deadline_s"
                    )
                await anyio.sleep(SERVER_POLL_S)

    async def _late(self) -> list[str]:
        """Return the servers that take memory, or may, or were out of the way of an earlier turn and may not be now."""
        entries = await self._bus.entries("server.", ServerState)
        return sorted(state.server_id for state, _ in entries.values() if state.card not in ("", self.hold))
