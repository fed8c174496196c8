"""One start among a run's starts: what it finds of the earlier ones, what it changes, and what it leaves for the roles.

The settings that a run had are those that it recorded, with what operators have changed since; a start is told of as
far as it makes them otherwise. What it says otherwise than the record holds, whatever an operator had made of it; where
it repeats the record, as the same command does, the operator's change holds.
"""

from contextlib import suppress
from dataclasses import dataclass

import anyio
import anyio.to_thread
import msgspec

from areal_async.bus import Bus
from areal_async.config.change_record import record_change
from areal_async.config.live import held_changes, settings_now, value_of
from areal_async.config.resumed import SettingDifference, differences, without
from areal_async.config.settings import Settings
from areal_async.controller.sampler import is_without_mix
from areal_async.errors import BusError, UserError
from areal_async.launch.orders import goes_back
from areal_async.launch.run_directory import RunDirectory, SettingsSources
from areal_async.launch.supervisor import Notify
from areal_async.protocol.arms import Arms
from areal_async.protocol.events import RunOrdered, SettingChanged
from areal_async.protocol.journal import Journal
from areal_async.protocol.run_state import Changes, Rollback, RunState
from areal_async.protocol.subjects import ADMITTED, ARMS, CHANGES, CHECKPOINT, ROLLBACK, RUN_STATE
from areal_async.protocol.types import Admitted, CheckpointRecord, Cut, CutKind, Version, WeightsVersion
from areal_async.versions.arms import remove_unserved

RESUMED = "the run was resumed with it"
"""Why a setting has changed that no order has."""
LAST_WORDS_S = 5.0
"""For the bus to take how the processes have ended, and to say where the run stands."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """Who starts a run, and how."""

    by: str
    """Name of who starts it, for the run's record of orders and changed settings."""
    is_fresh: bool = False
    """Forget what the bus holds of an earlier run of this name."""
    named: frozenset[str] = frozenset()
    """Settings that it speaks of, be it as they were."""
    said: SettingsSources | None = None
    """What the other sources of its settings say."""


async def is_finished(bus: Bus, *, steps: int) -> bool:
    """Say whether a run has finished, came as far as it is wanted to come now, and is not to go back."""
    state, _ = await bus.get(RUN_STATE, RunState)
    if state is None or state.state != "finished":
        return False
    order, _ = await bus.get(ROLLBACK, Rollback)
    newest, _ = await bus.get(bus.names.weights_key(), WeightsVersion)
    is_due = order is not None and order.is_due
    return not is_due and (newest is None or (newest.final and Version.parse(newest.version).step >= steps))


async def begin(bus: Bus, directory: RunDirectory, settings: Settings, start: Start, *, notify: Notify) -> None:
    """Tell of where the run goes on from and with what else than before, and leave its settings for the roles.

    Raises:
        UserError: its record cannot take what is changed.
    """
    found, _ = await bus.get(CHANGES, Changes)
    changes = found or Changes()
    recorded = directory.read_settings() if directory.exists else settings
    left = without(changes, {one.name for one in differences(recorded, settings)})
    changed = differences(settings_now(recorded, changes), settings_now(settings, left))
    for one in changed:
        await _check(bus, settings, one)
    order, _ = await bus.get(ROLLBACK, Rollback)
    due = order if order is not None and order.is_due else None
    await _tell_where(bus, directory, settings.run.name, notify, due=due)
    if due is not None:
        await _take_end_back(bus)
    directory.write_settings(settings)
    if start.said is not None:
        directory.write_said(start.said)
    if left != changes:
        await bus.put(CHANGES, left)
    for name, value in held_changes(settings, left):
        if name in start.named and value != value_of(settings, name):
            by = left.by_setting[name].by or "an operator"
            notify(
                f"{name} is {value}, as {by} has changed it: resume --set {name}=... changes it once the run goes on"
            )
    for one in changed:
        notify(one.sentence + (": for the prompts that are admitted from now on" if _is_ratio(one) else ""))
        event = SettingChanged(setting=one.name, before=one.before, after=one.after, by=start.by, reason=RESUMED)
        await _note(bus, directory, event)
    await _note(bus, directory, RunOrdered(order="start", by=start.by, reason=""))
    arms, _ = await bus.get(ARMS, Arms)
    await anyio.to_thread.run_sync(remove_unserved, directory.path, arms or Arms())


async def _note(bus: Bus, directory: RunDirectory, event: RunOrdered | SettingChanged) -> None:
    await anyio.to_thread.run_sync(record_change, directory.path, event)
    await bus.publish_event(event)


async def _take_end_back(bus: Bus) -> None:
    """Have nobody take the end that the run had for the one to come, before it has gone back."""
    key = bus.names.weights_key()
    newest, revision = await bus.get(key, WeightsVersion)
    if newest is not None and newest.final:
        await bus.compare_and_set(key, msgspec.structs.replace(newest, final=False), revision)


def _is_ratio(one: SettingDifference) -> bool:
    return one.name.startswith("tasks.") and one.name.endswith(".ratio")


async def _check(bus: Bus, settings: Settings, one: SettingDifference) -> None:
    """Hold what is changed against what the run has recorded.

    Raises:
        UserError: its prompts follow from the mix that they were admitted by, or it has come further already.
    """
    if _is_ratio(one):
        record, _ = await bus.get(ADMITTED, Admitted)
        if is_without_mix(record):
            raise UserError(
                f"run {settings.run.name}: {one.sentence}; its prompts were admitted before each task had epochs of "
                "its own, and their order follows from that: put back what was, choose another --run.name, or give "
                "--fresh to start anew"
            )
    if one.name == "run.steps" and one.after < (done := await _last_cut_step(bus)):
        raise UserError(f"run.steps: got {one.after}, need at least {done}: so many are cut for training already")


async def _last_cut_step(bus: Bus) -> int:
    """Return the last step of which the journal holds the cut; 0 for none."""
    journal, names = Journal(), bus.names
    for message in await bus.read_log(names.outcomes_stream, names.cuts):
        if (entry := await bus.decode(message, Cut)) is not None:
            journal.add_cut(entry, sequence=message.sequence)
    return journal.last_step


async def _tell_where(bus: Bus, directory: RunDirectory, run: str, notify: Notify, *, due: Rollback | None) -> None:
    """Say from which step the run goes on; of one that had finished, after what was its end is set aside.

    Args:
        due: an order to go back.
    """
    state, _ = await bus.get(RUN_STATE, RunState)
    record, _ = await bus.get(CHECKPOINT, CheckpointRecord)
    if state is None:
        return
    step = Version.parse(record.version).step if record is not None else 0
    if state.state == "finished":
        kept = directory.set_models_aside()
        aside = f"; the model of that step is kept as {' and '.join(kept)}" if kept else ""
        where = f"goes on from step {step}" if due is None else goes_back(due)
        notify(f"run {run} had finished, and {where}{aside}")
        return
    if due is not None:
        notify(f"run {run} {goes_back(due)}")
        return
    again = await _replayed(bus, after_step=step)
    notify(f"run {run} goes on from step {step}{', its newest checkpoint' if step else ''}{again}")


async def _replayed(bus: Bus, *, after_step: int) -> str:
    """Say which steps are trained from the journal, as far as its last entry tells."""
    last = await bus.get_last(bus.names.outcomes_stream, bus.names.cuts)
    entry = await bus.decode(last, Cut) if last is not None else None
    if entry is None or entry.kind is not CutKind.CUT or entry.step <= after_step:
        return ""
    first, last_step = after_step + 1, entry.step
    steps = f"step {first}" if first == last_step else f"steps {first} to {last_step}"
    return f"; first it trains {steps} as cut before, from what is stored"


async def resume_point(bus: Bus, directory: RunDirectory) -> int:
    """Return the step that the next start goes on from; of a broker that does not answer, as the files have it."""
    with anyio.move_on_after(LAST_WORDS_S, shield=True), suppress(BusError):
        record, _ = await bus.get(CHECKPOINT, CheckpointRecord)
        return Version.parse(record.version).step if record is not None else 0
    return directory.checkpointed_step


async def has_tickets(bus: Bus) -> bool:
    """Say whether a prompt was ever admitted; of a broker that does not answer, that one may have been."""
    with anyio.move_on_after(LAST_WORDS_S, shield=True), suppress(BusError):
        return (await bus.stream_state(bus.names.tickets_stream)).last_sequence > 0
    return True
