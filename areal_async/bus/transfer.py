"""A run's streams at another broker, whole: messages under their numbers, consumers with what they have acknowledged.

One broker tells a stream as a snapshot, in pieces, and the other takes these in; no message is sent anew. Invariant:
what has arrived is compared with what was told, message by message, before it counts as moved.
"""

import asyncio
import hashlib
from contextlib import suppress
from typing import Any, NamedTuple

import anyio
import msgspec
import structlog

from areal_async.bus.api import ApiError, MissingError, decode_answer
from areal_async.bus.connection import NO_RESPONDERS, Received
from areal_async.bus.jetstream import Bus
from areal_async.bus.streams import all_streams, declare, delete_run
from areal_async.config.settings import Settings
from areal_async.errors import BusError, UserError

PIECE_BYTES = 128 << 10
SILENT_S = 60.0
"""How long a broker may be silent between two pieces of a stream."""
ANSWER_S = 600.0
"""How long it may take to begin, and to take in what it was given."""
STATE = ("messages", "last_seq", "num_deleted", "consumer_count")
"""What a broker says of a stream, and the other is to say too."""
CONSUMER = ("num_ack_pending", "num_pending")
"""And of each of its consumers: a broker that takes in a stream without messages counts their places anew."""
LOOK_S = 0.1
SETTLED_S = 30.0
"""Time for a cluster to have the consumers of a stream that it has."""
DONE = "204"
"""Status of the last piece of a stream that was told to its end."""

log = structlog.get_logger()


class MovedStream(NamedTuple):
    """What is alike at both brokers."""

    name: str
    num_messages: int
    sha256: str
    """Of all messages, their numbers, subjects, headers and times of storing included."""


async def move_streams(source: Bus, target: Bus, settings: Settings) -> list[MovedStream]:
    """Have all streams of a run at another broker as they are here, where nothing is changed.

    Nobody may write to either meanwhile. What cannot be finished is taken away there again.

    Args:
        settings: the run's, of that broker: it then has as many copies as they say.

    Raises:
        UserError: the other broker has streams of this run already, or cannot have what the settings say.
        BusError: a stream did not arrive as it was.
    """
    run, there = source.names.run, target.connection.url
    streams = [stream for stream in all_streams(source.names) if await _info(source, stream) is not None]
    for stream in all_streams(target.names):
        if await _info(target, stream) is not None:
            raise UserError(f"run {run}: {there} has {stream} already; remove its streams there, or name another")
    try:
        moved = []
        for stream in streams:
            await _move(source, target, stream)
            moved.append(await _compared(source, target, stream))
            log.info("stream.moved", **moved[-1]._asdict())
        await declare(target, settings)
        return moved
    except BaseException:
        with anyio.CancelScope(shield=True), suppress(BusError):
            await delete_run(target)
        raise


async def _move(source: Bus, target: Bus, stream: str) -> None:
    """Pass the pieces of a snapshot on. Each is acknowledged to the one broker once the other has it."""
    pieces: asyncio.Queue[Received] = asyncio.Queue()
    inbox = source.connection.new_inbox()
    async with source.connection.listening(inbox, pieces.put_nowait):
        told = await _ask(
            source, f"$JS.API.STREAM.SNAPSHOT.{stream}", {"deliver_subject": inbox, "chunk_size": PIECE_BYTES}
        )
        begun = await _ask(
            target, f"$JS.API.STREAM.RESTORE.{stream}", {"config": told["config"], "state": told["state"]}
        )
        to = str(begun["deliver_subject"])
        while (piece := await _next(pieces, stream)).data:
            if error := await _give(target, to, piece.data):
                raise BusError(f"stream {stream}: {target.connection.url} does not take it: {error.decode()}")
            if piece.reply:  # else there is no more to wait for
                await source.connection.publish(piece.reply)
        if (status := piece.headers.get("Status", DONE)) != DONE:
            raise BusError(f"stream {stream}: was not told to its end: status {status} {piece.headers}")
        ended = decode_answer(to, await _give(target, to, b""))
        if "error" in ended:
            raise ApiError(to, ended["error"])


async def _ask(bus: Bus, subject: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the answer to what is asked once: of two snapshots of a stream the pieces could not be told apart."""
    answer = decode_answer(subject, await _give(bus, subject, msgspec.json.encode(body)))
    if "error" in answer:
        raise ApiError(subject, answer["error"])
    return answer


async def _give(bus: Bus, to: str, data: bytes) -> bytes:
    """Return what a broker answers. Of a cluster another server may do it, which all of them find in a moment."""
    with anyio.move_on_after(ANSWER_S):
        while True:
            answer = await bus.connection.request(to, data, deadline_s=ANSWER_S)
            if answer.status != NO_RESPONDERS:
                return answer.data
            await anyio.sleep(LOOK_S)
    raise BusError(f"{to}: nobody takes what is moved there within {ANSWER_S:g} s")


async def _next(pieces: "asyncio.Queue[Received]", stream: str) -> Received:
    with anyio.move_on_after(SILENT_S):
        return await pieces.get()
    raise BusError(f"stream {stream}: the rest of it was not told within {SILENT_S:g} s")


async def _compared(source: Bus, target: Bus, stream: str) -> MovedStream:
    """Return what a stream holds at both brokers.

    Raises:
        BusError: they differ.
    """
    here, ends_at_s = await _told(source, stream), anyio.current_time() + SETTLED_S
    while (there := await _told(target, stream)) != here:
        what = next(key for key in here if here[key] != there.get(key))
        if anyio.current_time() > ends_at_s or not target.is_clustered:
            raise BusError(f"stream {stream}: {what} is {here[what]!r:.200} here, and {there.get(what)!r:.200} there")
        await anyio.sleep(LOOK_S)
    return MovedStream(stream, here["messages"], here["sha256"])


async def _told(bus: Bus, stream: str) -> dict[str, Any]:
    """Return what a broker says of a stream, and a digest of all that is in it."""
    state = (await bus.api.ask(f"$JS.API.STREAM.INFO.{stream}"))["state"]
    told: dict[str, Any] = {key: state.get(key, 0) for key in STATE}
    for name in sorted((await bus.api.ask(f"$JS.API.CONSUMER.NAMES.{stream}"))["consumers"] or []):
        info = await bus.api.ask(f"$JS.API.CONSUMER.INFO.{stream}.{name}")
        told[f"consumer {name}"] = {key: info[key] for key in CONSUMER}
    digest, sequence = hashlib.sha256(), 0
    while batch := await bus.api.read_batch(stream, ">", sequence + 1):
        for message in batch:
            digest.update(msgspec.msgpack.encode((*message[1:-1], message.stored_at)))
        sequence = batch[-1].sequence
    return told | {"sha256": digest.hexdigest()}


async def _info(bus: Bus, stream: str) -> dict[str, Any] | None:
    try:
        return await bus.api.ask(f"$JS.API.STREAM.INFO.{stream}")
    except MissingError:
        return None
