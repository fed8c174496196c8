"""Declaring what a run needs at the broker, from its settings; numbers are derived, never typed.

Declaring is idempotent. What differs is changed where nothing can be lost by it, and refused otherwise.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import anyio
import structlog

from areal_async.bus.api import ApiError, MissingError
from areal_async.bus.images import CHUNK_BYTES
from areal_async.bus.jetstream import Bus
from areal_async.bus.keys import HISTORY, NODES_HISTORY
from areal_async.config.settings import (
    MAX_PAYLOAD_BYTES,
    MESSAGE_OVERHEAD_BYTES,
    TRAJECTORY_ACK_WAIT_S,
    Settings,
)
from areal_async.errors import FencedError, UserError
from areal_async.protocol.subjects import NODES, SERVERS, Names

SCHEMA = {"areal.schema": "1"}
CHANGEABLE = {
    "subjects",
    "max_bytes",
    "max_msgs",
    "duplicate_window",
    "max_msg_size",
    "metadata",
    "description",
    "allow_rollup_hdrs",
    "num_replicas",
}
"""Fields of a stream that may change under its messages."""
MIN_ACK_PENDING = 1000
MAX_EVENTS_BYTES = 16 << 20
MAX_EVENT_BYTES = 64 << 10
MAX_EVENT_AGE_S = 30 * 86400.0
ADVISORIES = ("CREATED", "DELETED", "MSG_TERMINATED", "MAX_DELIVERIES")
"""Advisories about consumers that are kept: a lineage is taken, a message is given up."""
MAX_EVAL_BYTES = 64 << 20
"""Room for the tickets and results of evaluations; a writer that finds none waits for it."""
MAX_DEAD_BYTES = 64 << 20
"""Room for dead letters. Newer ones are refused, with an event and a log line; no flood displaces the first."""
MAX_NODES_KEYS = 1000
"""Keys that nodes write; one that is there can always be written again. Of more than 1024 the broker refuses to tell
the newest values."""
MAX_NODES_VALUE_BYTES = 16 << 10
MAX_SUBJECT_BYTES = 4 << 10
"""The broker's own limit, with what it writes beside a message."""
ROOM_BYTES = 64 << 20
"""Room on the embedded broker's disk for what no node may write: prompts, the log and the run's own keys."""
STORAGE_RESERVED = 10047
"""The broker's disk limit is below what the streams reserve."""
NO_CLUSTER, NO_PEERS = 10074, 10005
"""Answers to more copies than there are servers, of a broker that is alone and of a cluster."""
COPY_LOOK_S = 0.2
RAISE_DEADLINE_S = 300.0
"""Time for a stream's new copies to hold all that it holds; an empty one's take 20 s."""

log = structlog.get_logger()


async def declare(bus: Bus, settings: Settings) -> None:
    """Make the run's streams, shared consumers and buckets, or check and adapt those that exist.

    Raises:
        UserError: a stream exists and was made otherwise, or the disk is too small.
    """
    need = reserved_bytes(settings) + ROOM_BYTES
    if settings.bus.url == "embedded" and need > settings.bus.max_disk_bytes:
        raise UserError(
            f"bus.max_disk_bytes: got {settings.bus.max_disk_bytes}, need at least {need} for what nodes may fill and "
            f"{ROOM_BYTES} beside it; raise it, or lower rollout.max_stream_bytes or rollout.max_image_stream_bytes"
        )
    raised = [config["name"] for config in stream_configs(settings) if await _declare_stream(bus, config)]
    for stream, config in consumer_configs(settings):
        await _create_consumer(bus, stream, config)
    if raised:
        await _wait_copied(bus, raised, settings.bus.replicas)


def reserved_bytes(settings: Settings) -> int:
    """Return what the streams with a limit of their own take of the broker's disk at the most."""
    return sum(config.get("max_bytes", 0) for config in stream_configs(settings))


def stream_configs(settings: Settings) -> list[dict[str, Any]]:
    """Return every stream's configuration, in the broker's own terms.

    Each that nodes may write to has a limit, so that there is always room in the others.
    """
    names, run = settings.names, f"areal.{settings.run.name}"
    common = {
        "storage": "file",
        "num_replicas": settings.bus.replicas,
        "discard": "new",
        "allow_direct": True,
        "duplicate_window": _ns(settings.duplicate_window_s),
        "metadata": {**SCHEMA, "areal.run": settings.run.name},
    }
    work: dict[str, Any] = {**common, "retention": "workqueue"}
    audit: dict[str, Any] = {**common, "retention": "limits", "deny_delete": True}

    def stream(name: str, holds: str, *subjects: str, **config: Any) -> dict[str, Any]:
        return {"name": name, "description": holds, "subjects": list(subjects), **config}

    def bucket(name: str, holds: str, history: int, **config: int) -> dict[str, Any]:
        # no rollup: by its header anyone who may write one key could purge them all
        keys = {**audit, "max_msgs_per_subject": history, "allow_rollup_hdrs": False, **config}
        return stream(f"KV_{name}", holds, f"$KV.{name}.>", **keys)

    return [
        stream(names.tickets_stream, "prompts to try, until they were", f"{run}.tickets.>", **work),
        stream(
            names.trajectories_stream,
            "what came of them, until a checkpoint contains it",
            f"{run}.trajectories.>",
            **work,
            max_bytes=settings.rollout.max_stream_bytes,
            max_msg_size=MAX_PAYLOAD_BYTES,
            allow_atomic=True,
        ),
        stream(
            names.images_stream,
            "what they look at, until no group needs it",
            names.all_images,
            **audit,
            max_bytes=settings.rollout.max_image_stream_bytes,
            max_msg_size=CHUNK_BYTES + MESSAGE_OVERHEAD_BYTES,
        ),
        stream(
            names.outcomes_stream,
            "what became of every group, and the journal of cuts",
            names.outcomes,
            names.cuts,
            **audit,
        ),
        stream(names.eval_stream, "held-out rows and their results", f"{run}.eval.>", **work, max_bytes=MAX_EVAL_BYTES),
        stream(
            names.dead_stream,
            "what failed every attempt or cannot be read",
            f"{run}.dead.>",
            **audit,
            max_bytes=MAX_DEAD_BYTES,
        ),
        stream(
            names.events_stream,
            "what has happened",
            names.all_events,
            *_advisories(names),
            **{**audit, "discard": "old"},
            max_bytes=MAX_EVENTS_BYTES,
            max_msg_size=MAX_EVENT_BYTES,
            max_age=_ns(MAX_EVENT_AGE_S),
        ),
        bucket(names.bucket, "the state of the run", HISTORY),
        bucket(
            names.nodes_bucket,
            "what nodes say of themselves and their servers",
            NODES_HISTORY,
            max_msgs=MAX_NODES_KEYS,
            max_msg_size=MAX_NODES_VALUE_BYTES,
            max_bytes=MAX_NODES_KEYS * (MAX_NODES_VALUE_BYTES + MAX_SUBJECT_BYTES),  # never reached
        ),
    ]


def consumer_configs(settings: Settings) -> list[tuple[str, dict[str, Any]]]:
    """Return the shared consumers, each with its stream's name."""
    names, run = settings.names, f"areal.{settings.run.name}"
    num_pending = max(MIN_ACK_PENDING, 2 * settings.rollout.max_groups_in_flight)

    def leased(name: str, *, max_ack_pending: int = num_pending, **config: str) -> dict[str, Any]:
        return _consumer(name, ack_wait=_ns(settings.ticket_ack_wait_s), max_ack_pending=max_ack_pending, **config)

    # results are acked when the evaluation is whole, however many rows it has
    results = leased(names.eval_controller_consumer, filter_subject=f"{run}.eval.results.>", max_ack_pending=-1)
    pairs = leased(names.arm_controller_consumer, filter_subject=names.arm_results("*"), max_ack_pending=-1)
    return [
        (names.tickets_stream, leased(names.nodes_consumer)),
        (names.eval_stream, leased(names.eval_nodes_consumer, filter_subject=f"{run}.eval.tickets.>")),
        (names.eval_stream, results),
        (names.eval_stream, leased(names.arm_nodes_consumer, filter_subject=names.arm_tickets("*"))),
        (names.eval_stream, pairs),
    ]


async def take_trainer_consumer(bus: Bus, lineage: int) -> str:
    """Make the consumer of a lineage anew and delete every older one: from now on their acks reach nothing.

    It delivers all that is stored, also what one of the same name had sent to nobody.

    Returns:
        Its name.

    Raises:
        FencedError: a newer lineage has its consumer already.
    """
    stream, name = bus.names.trajectories_stream, bus.names.trainer_consumer(lineage)
    answer = await bus.api.ask(f"$JS.API.CONSUMER.NAMES.{stream}")
    taken = [re.fullmatch(r"trainer-(\d+)", other) for other in answer["consumers"] or []]
    numbers = {match[0]: int(match[1]) for match in taken if match}
    newer = [other for other, number in numbers.items() if number > lineage]
    if newer:
        raise FencedError(f"lineage {lineage}: {newer[0]} has taken over")
    for other in numbers:
        with suppress(MissingError):
            await bus.api.ask(f"$JS.API.CONSUMER.DELETE.{stream}.{other}")
        if other != name:
            log.info("lineage.fenced", consumer=other, by=name)
    config = _consumer(name, ack_wait=_ns(TRAJECTORY_ACK_WAIT_S), max_ack_pending=-1, headers_only=True)
    await _create_consumer(bus, stream, config)
    if bus.is_clustered:
        await _wait_alone(bus, stream)
    return name


async def _wait_alone(bus: Bus, stream: str) -> None:
    """Wait until a stream's leader knows of no consumer but the one just made.

    A cluster decides which consumers there are, and its servers carry that out, each in its own time: an ack of a
    deleted one could still take a message after the stream was read.

    Raises:
        BusError: it has another one for longer than an operation may take.
    """
    retry = bus.api.retry(f"consumers of {stream}")
    while (num_consumers := (await bus.api.leader_info(stream))["state"]["consumer_count"]) != 1:
        retry.last_seen = f"its leader has {num_consumers}"
        await retry.pause()


async def delete_run(bus: Bus) -> None:
    """Delete everything the run has at the broker; what is not there is no error."""
    for stream in all_streams(bus.names):
        with suppress(MissingError):
            await bus.api.ask(f"$JS.API.STREAM.DELETE.{stream}")


async def forget_nodes(bus: Bus) -> None:
    """Delete all keys that nodes have written, also those in the run's own bucket, where earlier versions had them."""
    names = bus.names
    await bus.api.ask(f"$JS.API.STREAM.PURGE.KV_{names.nodes_bucket}")
    for keys in (SERVERS, NODES):
        await bus.api.ask(f"$JS.API.STREAM.PURGE.KV_{names.bucket}", {"filter": f"$KV.{names.bucket}.{keys}>"})


async def list_runs(bus: Bus) -> list[str]:
    """Return the names of the runs that this broker holds, sorted."""
    streams: list[str] = []
    while True:
        answer = await bus.api.ask("$JS.API.STREAM.NAMES", {"offset": len(streams)})
        streams += answer["streams"] or []
        if not answer["streams"] or len(streams) >= answer["total"]:
            break
    tickets = [stream for stream in streams if stream.startswith("AREAL_") and stream.endswith("_TICKETS")]
    return sorted(stream.removeprefix("AREAL_").removesuffix("_TICKETS") for stream in tickets)


def all_streams(names: Names) -> list[str]:
    """Return every stream of a run, the buckets' included."""
    return [
        names.tickets_stream,
        names.trajectories_stream,
        names.images_stream,
        names.outcomes_stream,
        names.eval_stream,
        names.dead_stream,
        names.events_stream,
        f"KV_{names.bucket}",
        f"KV_{names.nodes_bucket}",
    ]


def _advisories(names: Names) -> list[str]:
    """Return the subjects on which the broker tells of this run's streams and of their consumers."""
    streams = [stream for stream in all_streams(names) if stream != names.events_stream]
    return [
        *(f"$JS.EVENT.ADVISORY.STREAM.*.{stream}" for stream in streams),
        *(f"$JS.EVENT.ADVISORY.CONSUMER.{what}.{stream}.>" for stream in streams for what in ADVISORIES),
    ]


async def _declare_stream(bus: Bus, config: dict[str, Any]) -> bool:
    """Make a stream, or adapt one; say whether it is to have more copies than it had."""
    name = config["name"]
    try:
        info = await bus.api.ask(f"$JS.API.STREAM.INFO.{name}")
    except MissingError:
        await _write_stream(bus, "CREATE", config)
        log.info("stream.created", stream=name)
        return False
    existing = info["config"]
    if existing["num_replicas"] > config["num_replicas"]:
        raise UserError(
            f"bus.replicas: got {config['num_replicas']}, and stream {name} has {existing['num_replicas']} copies, "
            f"which it keeps; set bus.replicas: {existing['num_replicas']}"
        )
    different = {key for key, value in config.items() if not _agrees(existing.get(key), value)}
    for key in sorted(different - CHANGEABLE):
        raise UserError(
            f"stream {name}: {key} got {existing.get(key)}, need {config[key]}; "
            "it was made otherwise: use --fresh or another run.name"
        )
    limits = {
        bus.names.trajectories_stream: "rollout.max_stream_bytes",
        bus.names.images_stream: "rollout.max_image_stream_bytes",
    }
    if name in limits and "max_bytes" in different and 0 < config["max_bytes"] < info["state"]["bytes"]:
        raise UserError(
            f"{limits[name]}: got {config['max_bytes']}, need at least the {info['state']['bytes']} "
            f"bytes that {name} holds; raise it"
        )
    if different:
        await _write_stream(bus, "UPDATE", {**existing, **config})
        log.info("stream.updated", stream=name, fields=sorted(different))
    return "num_replicas" in different


async def _write_stream(bus: Bus, action: str, config: dict[str, Any]) -> None:
    try:
        await bus.api.ask(f"$JS.API.STREAM.{action}.{config['name']}", config)
    except ApiError as exc:
        if exc.err_code == STORAGE_RESERVED:
            raise UserError(
                f"stream {config['name']}: the broker has no {config['max_bytes']} bytes of disk left; "
                "lower rollout.max_stream_bytes or rollout.max_image_stream_bytes, raise bus.max_disk_bytes, "
                "or make room"
            ) from exc
        if exc.err_code in (NO_CLUSTER, NO_PEERS):
            raise UserError(
                f"bus.replicas: got {config['num_replicas']}, and the broker has not so many servers "
                f"({exc.description}); start them as configs/deploy/nats says, or set bus.replicas: 1"
            ) from exc
        raise


async def _wait_copied(bus: Bus, streams: Sequence[str], num_replicas: int) -> None:
    """Wait until each new copy of streams and of their consumers is whole: before, the loss of a leader is their end.

    Raises:
        UserError: it takes longer than ``RAISE_DEADLINE_S``.
    """

    def are_whole(told: Mapping[str, Any]) -> bool:
        cluster = told.get("cluster", {})
        copies = [copy for copy in cluster.get("replicas") or () if copy["current"]]
        return len(copies) == num_replicas - 1 and "leader" in cluster and "desired" not in cluster

    ends_at_s = anyio.current_time() + RAISE_DEADLINE_S
    for stream in streams:
        consumers = (await bus.api.ask(f"$JS.API.CONSUMER.NAMES.{stream}"))["consumers"] or []
        for subject in (f"STREAM.INFO.{stream}", *(f"CONSUMER.INFO.{stream}.{one}" for one in consumers)):
            while not are_whole(await bus.api.ask(f"$JS.API.{subject}")):
                if anyio.current_time() > ends_at_s:
                    raise UserError(
                        f"bus.replicas: {stream} has no {num_replicas} whole copies after {RAISE_DEADLINE_S:g} s; "
                        "see that all servers of the cluster run, and start again"
                    )
                await anyio.sleep(COPY_LOOK_S)


async def _create_consumer(bus: Bus, stream: str, config: dict[str, Any]) -> None:
    """Create a consumer, or change one of the same name."""
    subject = f"$JS.API.CONSUMER.CREATE.{stream}.{config['name']}"
    if "filter_subject" in config:
        subject += f".{config['filter_subject']}"
    await bus.api.ask(subject, {"stream_name": stream, "config": config})


def _consumer(name: str, **config: Any) -> dict[str, Any]:
    return {
        "name": name,
        "durable_name": name,
        "ack_policy": "explicit",
        "deliver_policy": "all",
        "replay_policy": "instant",
        "max_deliver": -1,
        "metadata": SCHEMA,
        **config,
    }


def _agrees(existing: Any, wanted: Any) -> bool:
    """Whether the broker, which adds to metadata and leaves out what is false, has what is wanted."""
    if isinstance(wanted, dict):
        return isinstance(existing, dict) and wanted.items() <= existing.items()
    return bool(existing == wanted) or (wanted is False and existing is None)


def _ns(seconds: float) -> int:
    return int(seconds * 1_000_000_000)
