"""Arms: how many prompts they are asked, what came of them, and when they are told apart from the newest weights.

Beside training: no credits, never trained, and no admission waits for them. Of each arm the key ``arm.<name>`` is moved
on first, by compare-and-set; then what it says is open is published, under ids by arm, prompt and attempt; results are
acked after the key has counted them. So whichever process is killed, the share stays exact and no pair counts twice.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import anyio
import anyio.to_thread
import msgspec
import structlog

from areal_async.bus import Bus, Delivery
from areal_async.controller.accounts import Accounts
from areal_async.controller.tasks import Tasks
from areal_async.errors import ConflictError, FencedError
from areal_async.process.bell import Bell
from areal_async.process.failpoints import failpoint
from areal_async.protocol.arms import LEVELS, MAX_OPEN, Arm, ArmResult, Arms, ArmState, ArmTicket, OpenPrompt, summary
from areal_async.protocol.evaluations import EvalResult
from areal_async.protocol.events import ArmDecided, now
from areal_async.protocol.subjects import ARMS
from areal_async.protocol.types import Version
from areal_async.telemetry import spans, wait_graph
from areal_async.versions.arms import FILE, comparison_of
from areal_async.versions.comparison import FOLDER, Comparison, write_result
from areal_async.versions.sequential import ConfidenceSequence

RESULT_BATCH = 256
ROUND_S = 1.0
"""Longest wait for results between two looks at what is due."""
MAX_ATTEMPTS = 3
LOST = f"its ticket or its result was lost {MAX_ATTEMPTS} times"
FULL_SHARE = 0.25
"""Share of the stream's bytes from which on no arm is asked more: evaluations have room beside them."""
MAX_NEW = 16
"""Prompts of one arm that are asked at once: rows may be large."""
LINE_S = 5.0
"""Time between two lines about an arm."""
LOST_LOOKS = 2
"""Looks in a row at which neither a ticket nor a result was there of what is missing."""

log = structlog.get_logger()


@dataclass(kw_only=True)
class _Asked:
    """One arm, as this process knows it."""

    arm: Arm
    state: ArmState
    revision: int
    sequence: ConfidenceSequence
    published: set[tuple[int, int]] = field(default_factory=set)
    """Open prompts whose tickets this process has stored, each with its attempt."""
    results: dict[int, tuple[ArmResult, Delivery | None]] = field(default_factory=dict)
    """Results that wait for those of earlier prompts; without a message where it was lost."""
    written_s: float = -math.inf
    """When a line was written of it last."""
    num_looks: int = 0
    """In a row, at which all that is missing was lost."""

    @property
    def first_open(self) -> int:
        return self.state.num_counted + 1

    @property
    def missing(self) -> list[int]:
        """Open prompts without a result."""
        return [n for n in range(self.first_open, self.state.num_asked + 1) if n not in self.results]


class ArmQuestions:
    """Asks the arms of one run, and counts what they answer."""

    def __init__(
        self, bus: Bus, tasks: Tasks, accounts: Accounts, *, row_at: Callable[[int], int], directory: Path
    ) -> None:
        """Take what returns the row at a place in the order of the data, and the run's directory."""
        self._directory = directory
        self._bus = bus
        self._tasks = tasks
        self._accounts = accounts
        self._row_at = row_at
        self._wanted: Arms | None = None
        self._changed = Bell()
        self._asked: dict[str, _Asked] = {}
        """By the arm's id."""

    def report(self) -> dict[str, dict[str, object]]:
        """Say how far each arm is, by its name."""
        return {one.arm.name: summary(one.arm, one.state) for one in self._asked.values()}

    async def run(self) -> None:
        """Ask and count until cancelled.

        consumes:     the key ``arms``, results
        waits for:    either, and the next look at what was admitted
        produces:     tickets, the keys of the arms, an event for each that is told apart
        unblocked by: n/a; nobody waits for it

        Raises:
            FencedError: another controller counts.
        """
        async with anyio.create_task_group() as loops:
            loops.start_soon(self._run_wanted)
            await self._changed.wait(0)
            while True:
                num_seen = self._changed.num_rings
                await self._take_up()
                if self._asked:
                    await self._run_rounds(num_seen)
                else:
                    await self._changed.wait(num_seen)

    async def _run_wanted(self) -> None:
        async for wanted in self._bus.watch_key(ARMS, Arms):
            self._wanted = wanted
            self._changed.ring()

    async def _take_up(self) -> None:
        """Know exactly the arms that are wanted now, and remove what is stored for any others."""
        wanted = {arm.arm_id: arm for arm in (self._wanted or Arms()).by_name.values()}
        for gone in self._asked.keys() - wanted.keys():
            last = self._asked.pop(gone)
            self._write(last, is_last=True)
            log.info("arm.removed", name=last.arm.name)
        for arm_id in wanted.keys() - self._asked.keys():
            self._asked[arm_id] = await self._read(wanted[arm_id])
            log.info("arm.taken_up", **msgspec.structs.asdict(wanted[arm_id]))
        names, served = self._bus.names, (self._wanted or Arms()).served
        subjects = await self._bus.stored_by_subject(names.eval_stream, names.arm_messages("*"))
        for arm_id in {subject.rpartition(".")[2] for subject in subjects} - served.keys():
            await self._bus.purge(names.eval_stream, names.arm_messages(arm_id))

    async def _read(self, arm: Arm) -> _Asked:
        state, revision = await self._bus.get(self._bus.names.arm_key(arm.name), ArmState)
        if state is None or state.arm_id != arm.arm_id:  # an earlier one had the name
            state = ArmState(arm_id=arm.arm_id)
        return _Asked(arm=arm, state=state, revision=revision, sequence=sequence_of(arm, state))

    async def _run_rounds(self, num_seen: int) -> None:
        """Take turns at counting and asking, until other arms are wanted."""
        names = self._bus.names
        with wait_graph.PollingWaits() as waits:
            async with self._bus.consume(names.eval_stream, names.arm_controller_consumer) as inbox:
                while self._changed.num_rings == num_seen:
                    arrived = await inbox.fetch(RESULT_BATCH, wait_s=ROUND_S)
                    await self._take_in(arrived)
                    may_ask = not await self._is_full()
                    for one in self._asked.values():
                        await self._advance(one, may_ask=may_ask)
                        if not arrived:
                            await self._look_for_lost(one)
                    stuck = [wait_graph.arm(one.arm.name) for one in self._asked.values() if one.missing]
                    waits.replace(wait_graph.ARMS, stuck, "answers of")

    async def _take_in(self, arrived: list[Delivery]) -> None:
        """Keep what somebody waits for; what nobody does goes at once."""
        useless: list[Delivery] = []
        for delivery in arrived:
            result = await self._bus.decode(delivery, ArmResult)
            if result is None:
                continue
            asked = self._asked.get(result.arm_id)
            if asked is None or not asked.first_open <= result.number <= asked.state.num_asked:
                useless.append(delivery)
                continue
            _, known = asked.results.get(result.number, (None, None))
            if known is not None and known.sequence != delivery.sequence:
                useless.append(delivery)
            else:  # new, or nobody has acked it yet, so that it replaces itself
                asked.results[result.number] = result, delivery
        await self._bus.settle(useless)

    async def _advance(self, asked: _Asked, *, may_ask: bool) -> None:
        """Count what has come, in the order of the prompts, ask what is due, and publish what is open."""
        state, done = asked.state, []
        while state.open and (found := asked.results.get(state.num_counted + 1)) is not None:
            done.append(found)
            state = counted(state, asked.arm, asked.sequence, found[0])
        num_due = asked.arm.num_due(self._accounts.admitted.total) - state.num_asked
        num_new = min(num_due, MAX_NEW, MAX_OPEN - len(state.open)) if may_ask else 0
        new = [self._open(asked.arm, state.num_asked + number) for number in range(1, num_new + 1)]
        if new:
            state = msgspec.structs.replace(state, num_asked=state.num_asked + len(new), open=[*state.open, *new])
        if state != asked.state:
            failpoint("controller.before_arm_state")
            await self._move(asked, state)
            failpoint("controller.after_arm_state")
        for result, _ in done:
            del asked.results[result.number]
        await self._bus.settle([delivery for _, delivery in done if delivery is not None])
        await self._publish(asked)
        if done:
            self._write(asked)
        if state.decided_at and not state.is_told:
            await self._tell(asked)

    async def _move(self, asked: _Asked, state: ArmState) -> None:
        key = self._bus.names.arm_key(asked.arm.name)
        try:
            asked.revision = await self._bus.compare_and_set(key, state, asked.revision)
        except ConflictError as exc:
            raise FencedError(
                f"arm {asked.arm.name}: another controller of this run counts; this one must stop"
            ) from exc
        asked.state = state

    def _write(self, asked: _Asked, *, is_last: bool = False) -> None:
        """Add a line about an arm, not too often: curves are made of them."""
        now_s = anyio.current_time()
        if now_s - asked.written_s < LINE_S and asked.state.is_told == bool(asked.state.decided_at) and not is_last:
            return
        asked.written_s = now_s
        held = self._accounts.held
        line = {"at": now(), "step": held.step if held is not None else 0, "name": asked.arm.name}
        try:
            with (self._directory / FILE).open("ab") as file:
                file.write(msgspec.json.encode(line | summary(asked.arm, asked.state)) + b"\n")
        except OSError as exc:  # curves lack a point, and the run goes on
            log.warning("arm.not_written", cause=str(exc))

    def _open(self, arm: Arm, number: int) -> OpenPrompt:
        return OpenPrompt(index=self._row_at(arm.position(number)))

    async def _publish(self, asked: _Asked) -> None:
        """Store the tickets of open prompts that this process has not; one that is there is dropped by its id."""
        prompts = dict(enumerate(asked.state.open, start=asked.first_open))
        current = {(number, prompt.attempt) for number, prompt in prompts.items()}
        asked.published &= current
        async with anyio.create_task_group() as publishing:
            for number, _ in current - asked.published - {(n, prompts[n].attempt) for n in asked.results}:
                publishing.start_soon(self._publish_one, asked.arm, number, prompts[number])
        asked.published |= current

    async def _publish_one(self, arm: Arm, number: int, prompt: OpenPrompt) -> None:
        workflow, row = self._tasks.at(prompt.index)
        ticket = ArmTicket(
            eval_id=str(self._accounts.held or Version(0, 0)),
            index=prompt.index,
            workflow=workflow,
            row=row,
            attempt=prompt.attempt,
            arm=arm.name,
            arm_id=arm.arm_id,
            number=number,
        )
        msg_id = f"arm-ticket.{ticket.answer}.{ticket.attempt}"
        with spans.asked(ticket):
            await self._bus.publish_patiently(self._bus.names.arm_tickets(arm.arm_id), ticket, msg_id=msg_id)

    async def _is_full(self) -> bool:
        state = await self._bus.stream_state(self._bus.names.eval_stream)
        return state.num_bytes > FULL_SHARE * state.max_bytes > 0

    async def _look_for_lost(self, asked: _Asked) -> None:
        """Ask again what is missing though no ticket of it is left and no result on its way."""
        missing = asked.missing
        if not missing:
            return
        names, arm_id = self._bus.names, asked.arm.arm_id
        stored = await self._bus.stored_by_subject(names.eval_stream, names.arm_messages(arm_id))
        num_tickets, num_results = (
            stored.get(one, 0) for one in (names.arm_tickets(arm_id), names.arm_results(arm_id))
        )
        num_held = sum(delivery is not None for _, delivery in asked.results.values())
        asked.num_looks = asked.num_looks + 1 if not num_tickets and num_results <= num_held else 0
        if asked.num_looks < LOST_LOOKS:
            return
        asked.num_looks = 0
        log.warning("arm.results_lost", name=asked.arm.name, num_lost=len(missing))
        prompts = dict(enumerate(asked.state.open, start=asked.first_open))
        for number in missing:
            prompt = prompts[number] = msgspec.structs.replace(prompts[number], attempt=prompts[number].attempt + 1)
            if prompt.attempt >= MAX_ATTEMPTS:
                lost = EvalResult(eval_id=str(Version(0, 0)), index=prompt.index, error=LOST)
                asked.results[number] = ArmResult(arm_id=arm_id, number=number, pinned=lost, newest=lost), None
        await self._move(asked, msgspec.structs.replace(asked.state, open=list(prompts.values())))

    async def _tell(self, asked: _Asked) -> None:
        """Tell once that an arm is better or worse: the stream of events knows whether that was done."""
        names, arm, state = self._bus.names, asked.arm, asked.state
        comparison = comparison_of(arm, state, run=names.run)
        event = decided(arm, state, comparison.comparison_id)
        subject = names.event(event.kind, self._bus.role)
        if not await self._was_told(subject, arm.arm_id):
            await anyio.to_thread.run_sync(self._keep, comparison)
            await self._bus.publish(subject, msgspec.json.encode(event), msg_id=f"arm-decided.{arm.arm_id}")
            log.info(event.kind, **msgspec.structs.asdict(event))
        failpoint("controller.after_arm_told")
        await self._move(asked, msgspec.structs.replace(state, is_told=True))

    def _keep(self, comparison: Comparison) -> None:
        """Leave a comparison in the run's directory, for whoever is to decide by it."""
        try:
            write_result(self._directory / FOLDER / comparison.comparison_id, comparison)
        except OSError as exc:  # the key of the arm knows it all
            log.warning("arm.not_written", cause=str(exc))

    async def _was_told(self, subject: str, arm_id: str) -> bool:
        async for message in self._bus.find_messages(self._bus.names.events_stream, subject):
            if msgspec.json.decode(message.data).get("arm_id") == arm_id:
                return True
        return False


def sequence_of(arm: Arm, state: ArmState) -> ConfidenceSequence:
    """Return the confidence sequence of an arm, with the pairs that are counted."""
    if not state.levels:
        return ConfidenceSequence(reach=arm.reach, alpha=arm.alpha)
    counts = {arm.reach * int(level) / LEVELS: count for level, count in state.levels.items()}
    return ConfidenceSequence.restored(counts, low=state.low, high=state.high, reach=arm.reach, alpha=arm.alpha)


def counted(state: ArmState, arm: Arm, sequence: ConfidenceSequence, result: ArmResult) -> ArmState:
    """Return the state after the oldest open prompt has its result; the sequence takes the pair in."""
    pinned, newest = result.pinned, result.newest
    state = msgspec.structs.replace(state, open=state.open[1:])
    failure = pinned.error or newest.error
    difference = pinned.reward - newest.reward
    if not failure and abs(difference) > arm.reach:
        failure = f"rewards differ by {difference:g}, need at most reach = {arm.reach:g}"
    if failure:
        return msgspec.structs.replace(state, num_failed=state.num_failed + 1, last_failure=failure[:200])
    level = level_of(difference / arm.reach, seed=result.number)
    sequence.add(arm.reach * level / LEVELS)
    levels = state.levels | {str(level): state.levels.get(str(level), 0) + 1}
    versions = [Version.parse(one) for one in (state.oldest, state.newest, newest.oldest, newest.newest) if one]
    return msgspec.structs.replace(
        state,
        levels=levels,
        low=sequence.low,
        high=sequence.high,
        pinned_total=state.pinned_total + pinned.reward,
        newest_total=state.newest_total + newest.reward,
        num_wins=state.num_wins + (difference > 0),
        num_losses=state.num_losses + (difference < 0),
        oldest=str(min(versions)) if versions else "",
        newest=str(max(versions)) if versions else "",
        decided_at=state.decided_at or (sum(levels.values()) if sequence.tells_apart else 0),
    )


def level_of(share: float, *, seed: int) -> int:
    """Return a difference, as a share of the reach, in whole ``LEVELS``: up or down at random, so that its mean stays.

    Differences of rewards of 0 and 1 are whole already.
    """
    exact = share * LEVELS
    below = math.floor(exact)
    return below + (random.Random(seed).random() < exact - below)


def decided(arm: Arm, state: ArmState, comparison_id: str) -> ArmDecided:
    """Return the event of an arm that is told apart."""
    difference = state.difference or 0.0
    return ArmDecided(
        name=arm.name,
        arm_id=arm.arm_id,
        version=arm.version or arm.path,
        difference=difference,
        low=state.low,
        high=state.high,
        alpha=arm.alpha,
        num_pairs=state.num_pairs,
        comparison=comparison_id,
        sentence=f"arm {arm.name} ({arm.version or arm.path}) is {'better' if state.low >= 0 else 'worse'} than the "
        f"newest weights by {abs(difference):.3f} ({state.low:+.3f} to {state.high:+.3f} at alpha {arm.alpha:g}, "
        f"{state.num_pairs} pairs)",
    )
