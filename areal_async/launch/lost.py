"""What a run's store has lost since it was begun: named before anything is declared, never taken for a new run.

The broker knows nothing of a stream whose files are gone, and declaring makes it anew, empty: without its keys a run
would begin at its first prompt and empty its own metrics. Invariant: whatever of a run is trained is trained once.
"""

from collections.abc import Mapping

from areal_async.bus import Bus, StreamState
from areal_async.bus.api import MissingError
from areal_async.bus.streams import all_streams
from areal_async.config.resumed import EMBEDDED
from areal_async.config.settings import Settings
from areal_async.errors import UserError
from areal_async.launch.run_directory import RunDirectory
from areal_async.launch.supervisor import Notify
from areal_async.protocol.publish_log import FOLDER
from areal_async.protocol.subjects import ADMITTED, CHECKPOINT, LINEAGE, Names


async def find_lost(bus: Bus, directory: RunDirectory, settings: Settings, *, notify: Notify) -> None:
    """Check that the store has all that a run needs to go on, where it has begun; tell of what is made anew.

    Raises:
        UserError: what is lost cannot be made up for by what is left.
    """
    names = bus.names
    states = {stream: await state_of(bus, stream) for stream in all_streams(names)}
    counts = {stream: state.last_sequence if state is not None else 0 for stream, state in states.items()}
    # A holder of a node's key may store trajectories before any prompt is admitted: they tell where tickets cannot.
    told_by = names.tickets_stream if states[names.tickets_stream] is not None else names.trajectories_stream
    has_admitted = bool(counts[told_by]) or _has_trained(directory)
    if not has_admitted and not counts[f"KV_{names.bucket}"] and not counts[names.outcomes_stream]:
        return  # not even declared to the end, perhaps
    vital, others = _vital(names), _others(settings)
    never_empty = (f"KV_{names.bucket}", names.outcomes_stream) if has_admitted else ()
    lost = [
        stream
        for stream, state in states.items()
        if stream in vital and (state is None or (stream in never_empty and not counts[stream]))
    ]
    if len(lost) == len(vital):
        what = "all that it held"
    elif lost:
        what = " and ".join(f"{stream} ({vital[stream]})" for stream in lost)
    else:
        what = " and ".join(f"the key {key} of {names.bucket}" for key in await _lost_keys(bus, counts))
    if what:
        step = directory.checkpointed_step
        first = f"; export --run {names.run} first has the model of step {step}" if step else ""
        raise UserError(
            f"run {names.run}: {_place(directory, settings)} has lost {what}, and the rest does not make up for it; "
            f"put it back from a copy, choose another --run.name, or give --fresh to start anew{first}"
        )
    for stream, what in others.items():
        if states[stream] is None:
            notify(f"run {names.run}: {_place(directory, settings)} has lost {stream}, which is made anew: {what}")


def _vital(names: Names) -> dict[str, str]:
    """Return the streams without which a run cannot go on, each with what it holds."""
    return {
        f"KV_{names.bucket}": "how far the run has come",
        names.outcomes_stream: "what became of every group, and which ones each step trained",
        names.tickets_stream: "the prompts that are under way",
        names.trajectories_stream: "what was sampled and is in no checkpoint yet",
    }


def _others(settings: Settings) -> dict[str, str]:
    """Return the streams that a run goes on without, each with what is gone."""
    names = settings.names
    has_images = (
        "max_image_stream_bytes" in settings.rollout.model_fields_set
    )  # a record from before the stream lacks it
    images = {names.images_stream: "the groups under way whose images it held fail, and are tried again"}
    return (images if has_images else {}) | {
        names.eval_stream: "an evaluation that was under way is asked again",
        names.dead_stream: "the prompts that failed every attempt so far, and what could not be read, are not listed",
        names.events_stream: "what has happened so far is not told",
    }


async def _lost_keys(bus: Bus, counts: Mapping[str, int]) -> list[str]:
    """Return the keys that are gone, of those that are always written before the first message of a stream."""
    before = {
        ADMITTED: bus.names.tickets_stream,
        CHECKPOINT: bus.names.outcomes_stream,
        LINEAGE: bus.names.outcomes_stream,
    }
    there = await bus.keys(*before)
    return [key for key, stream in before.items() if counts[stream] and key not in there]


def _has_trained(directory: RunDirectory) -> bool:
    """Say whether the files of a run tell that it was begun."""
    files = (directory.path / "metrics.jsonl", *(directory.path / FOLDER).glob("*.jsonl"))
    return bool(directory.checkpointed_step) or any(path.stat().st_size for path in files if path.exists())


def _place(directory: RunDirectory, settings: Settings) -> str:
    """Name the store, for people."""
    return (
        f"its store in {directory.path / 'bus'}"
        if settings.bus.url == EMBEDDED
        else f"the broker at {settings.bus.url}"
    )


async def state_of(bus: Bus, stream: str) -> StreamState | None:
    """Return the state of a stream; None where the broker has none of that name: its files may be destroyed."""
    try:
        return await bus.stream_state(stream)
    except MissingError:
        return None
