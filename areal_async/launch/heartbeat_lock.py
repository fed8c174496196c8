"""Locks that heartbeats keep: the launcher's of the run, each joined node's of its id. A holder writes its key anew.

Invariant: of two holders of one key, one is told that it is the other's now. A holder is judged by the clock of
the process that looks: the key is written again while that one waits, or it is not.
"""

import os
import secrets
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import anyio
import msgspec

from areal_async.bus import Bus
from areal_async.errors import BusError, ConflictError, FencedError, UserError
from areal_async.launch.supervisor import Notify
from areal_async.protocol.events import now
from areal_async.protocol.run_state import Holder

BEAT_S = 2.0
"""How often a holder writes its key."""
NUM_MISSED = 4
"""Beats without a word after which a holder is dead, where another wants its key."""
RELEASE_DEADLINE_S = 2.0
REFUSAL = "need another id; leave it out for a new one"
"""What to do where somebody else holds a node's."""


def own_holder() -> Holder:
    """Return what this process says of itself from now on."""
    return Holder(holder_id=secrets.token_hex(8), host=socket.gethostname(), pid=os.getpid(), since=now())


async def run_beats(bus: Bus, key: str, holder: Holder, *, what: str) -> None:
    """Say again and again that a key is held.

    consumes:     nothing
    waits for:    the next beat
    produces:     the key, written anew
    unblocked by: cancellation alone

    Raises:
        FencedError: somebody else holds it now.
        BusError: the broker is away for longer than an operation may take.
    """
    revision = 0  # not known: whose the key is now is to be looked at first
    while True:
        try:
            revision = await bus.compare_and_set(key, holder, revision)
        except ConflictError:
            other, revision = await bus.get(key, Holder)
            if other is not None and other.holder_id != holder.holder_id:
                raise FencedError(f"{what}: kept by {other.place} since {other.since}; this one ends") from None
            continue  # what it wrote last was deleted, or lost by the broker
        await anyio.sleep(BEAT_S)


@asynccontextmanager
async def held(bus: Bus, key: str, *, what: str, notify: Notify) -> AsyncIterator[Holder]:
    """Take a key, and release it when the block ends; within, ``run_beats`` keeps it. A dead holder's is taken over.

    Args:
        what: is held, for sentences.

    Raises:
        UserError: somebody else holds it.
    """
    holder = own_holder()
    before, revision = await bus.get(key, Holder)
    if before is not None and not before.has_left:
        notify(f"{what} was kept by {before.place} lately; looking for {NUM_MISSED * BEAT_S:g} s whether it still is")
        word = await next_word(bus, key, within_s=NUM_MISSED * BEAT_S)
        if word is not None and not word.has_left:
            raise UserError(f"{what}: kept by {word.place} since {word.since}; {REFUSAL}")
        last, latest = await bus.get(key, Holder)
        if word is None and last is not None and latest != revision:  # it spoke just now
            raise UserError(f"{what}: kept by {last.place} since {last.since}; {REFUSAL}")
        revision = latest
    try:
        await bus.compare_and_set(key, holder, revision)
    except ConflictError as exc:
        raise UserError(f"{what}: another has taken it at this moment; {REFUSAL}") from exc
    try:
        yield holder
    finally:
        # let it go, as well as can be done quickly, unless it is another's now
        with anyio.move_on_after(RELEASE_DEADLINE_S, shield=True), suppress(BusError):
            current, revision = await bus.get(key, Holder)
            if current is not None and current.holder_id == holder.holder_id:
                await bus.compare_and_set(key, msgspec.structs.replace(holder, has_left=True), revision)


async def next_word(bus: Bus, key: str, *, within_s: float) -> Holder | None:
    """Return what is written under a key after what stands there now; None when nothing is within so long.

    Only time in which the broker answers counts: while it restarts or elects a leader nobody can write.
    """
    words = bus.watch_key(key, Holder)
    is_first = True
    while True:
        begun_s = anyio.current_time()
        with anyio.move_on_after(within_s):
            if is_first:
                await anext(words)
                is_first = False
            return await anext(words)
        if bus.api.answering_since_s <= begun_s:
            return None


async def wait_released(bus: Bus, prefix: str) -> None:
    """Wait until all who live have let go of the keys that begin so; the dead, who beat no more, are not waited for."""
    first = {key: revision for key, (_, revision) in (await bus.entries(prefix, Holder)).items()}
    dead_at = anyio.current_time() + 2 * BEAT_S
    while True:
        holders = await bus.entries(prefix, Holder)
        held_still = {key: revision for key, (holder, revision) in holders.items() if not holder.has_left}
        if anyio.current_time() > dead_at:
            held_still = {key: revision for key, revision in held_still.items() if first.get(key) != revision}
        if not held_still:
            return
        await anyio.sleep(BEAT_S / 10)
