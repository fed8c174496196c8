"""Who may do what on the bus: one table, from which the embedded broker's configuration is written.

Each role gets what its own work needs and no more: a node can neither ack a trajectory nor move a
cursor, and only the operator declares and deletes. Acks are granted per stream.
"""

from dataclasses import dataclass
from enum import StrEnum

from areal_async.protocol.subjects import (
    ACCOUNTS,
    ADMITTED,
    ARM_STATES,
    ARMS,
    CARD,
    CHANGES,
    CHECKPOINT,
    CONTROL,
    EVALUATIONS,
    HOSTS,
    JOURNAL,
    LAUNCHER,
    LINEAGE,
    NODES,
    ROLLBACK,
    RUN_STATE,
    SERVERS,
    Names,
)

SERVICES_INBOX = "_INBOX_services"
"""Prefix of the subjects on which operators receive what services answer. The broker's answers reach them there too, so
that a person's client needs one prefix; programs that act on these hear them in their own inbox, where nobody but the
broker can write."""

SERVER = "server"
"""Role name of the service that a node runs for each of its inference servers."""


class Role(StrEnum):
    """A kind of process on the bus; each has its own key and its own inbox."""

    OPERATOR = "operator"
    """The launcher and the command line: declares, deletes, watches and steers."""
    CONTROLLER = "controller"
    NODE = "node"
    TRAINER = "trainer"

    @property
    def inbox_prefix(self) -> str:
        """Where answers to this role arrive; no other role may listen there."""
        return f"_INBOX_{self.value}"


@dataclass(frozen=True, slots=True)
class Permissions:
    """Subjects (with wildcards) a role may publish and subscribe to. All others are denied."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def permissions(role: Role, names: Names) -> Permissions:
    """Return the whole list for one role of one run."""
    run = f"areal.{names.run}"
    publish = ["$JS.API.INFO", f"{run}.metrics.{role}.>", f"{run}.events.{role}.>", names.undecodable]
    subscribe = [f"{role.inbox_prefix}.>"]
    if role is not Role.OPERATOR:
        publish.append(f"{SERVICES_INBOX}.>")
        subscribe += [*_discovery(role), f"{run}.status.{role}.>"]
    if role is Role.NODE:
        subscribe += [*_discovery(SERVER), f"{run}.status.{SERVER}.>"]
    match role:
        case Role.OPERATOR:
            publish += ["$JS.API.>", "$JS.ACK.>", "$JS.FC.>", "$JS.SNAPSHOT.>", "$SRV.>", f"{run}.>", *_buckets(names)]
            subscribe += [f"{run}.>", *_buckets(names), "$JS.EVENT.ADVISORY.>", f"{SERVICES_INBOX}.>"]
        case Role.CONTROLLER:
            publish += [f"{run}.tickets.>", f"{run}.eval.tickets.>", names.all_images, names.outcomes]
            publish += _keys(names, ACCOUNTS, ADMITTED, ARMS, CHANGES, CONTROL, HOSTS, ROLLBACK, RUN_STATE)
            publish += _keys(names, f"{ARM_STATES}>", f"{EVALUATIONS}>", "fleet.>", f"{SERVERS}>")
            publish.append(names.arm_tickets("*"))
            publish += _consume(names.eval_stream, names.eval_controller_consumer)
            publish += _consume(names.eval_stream, names.arm_controller_consumer)
            publish += _api(names.eval_stream, "STREAM.PURGE.{}")  # what is stored for arms that were removed
            publish.append(f"$JS.API.CONSUMER.INFO.{names.eval_stream}.{names.eval_nodes_consumer}")
            publish += _read(names, names.outcomes_stream, names.images_stream, names.events_stream)
            publish += _api(names.images_stream, "STREAM.PURGE.{}")  # those of evaluations, which no trainer knows of
            publish += _state(names.tickets_stream, names.trajectories_stream, names.eval_stream, names.dead_stream)
            subscribe += [names.log, names.all_metrics, f"{run}.control.>", *_keys(names, ARMS, CONTROL, CHANGES)]
        case Role.NODE:
            publish += [f"{run}.trajectories.>", names.all_images, f"{run}.eval.results.>"]
            publish += [names.arm_results("*"), names.arm_answers("*")]
            publish += _keys(names, f"{SERVERS}>", f"{NODES}>")
            publish += _consume(names.tickets_stream, names.nodes_consumer)
            publish += _consume(names.eval_stream, names.eval_nodes_consumer)
            publish += _consume(names.eval_stream, names.arm_nodes_consumer)
            publish += _read(names, names.outcomes_stream, names.trajectories_stream, names.images_stream)
            subscribe += _keys(
                names, ARMS, CARD, CHANGES, CONTROL, RUN_STATE, LAUNCHER, "weights.>", "fleet.>", f"{NODES}>"
            )
        case Role.TRAINER:
            publish += [names.cuts, names.outcomes, names.dead_groups, names.weights]
            publish += _keys(names, LINEAGE, CHECKPOINT, JOURNAL, CARD, ROLLBACK, "weights.>")
            publish += _consume(names.trajectories_stream, "*")
            publish += _api(
                names.trajectories_stream,
                "CONSUMER.CREATE.{}.>",
                "CONSUMER.DELETE.{}.*",
                "CONSUMER.NAMES.{}",
                "STREAM.PURGE.{}",
            )
            publish += _api(names.images_stream, "STREAM.PURGE.{}")
            publish += _read(
                names,
                names.outcomes_stream,
                names.trajectories_stream,
                names.images_stream,
                names.tickets_stream,
                names.events_stream,
            )
            subscribe += [names.log, names.all_tickets, *_keys(names, CHANGES)]
    return Permissions(tuple(publish), tuple(dict.fromkeys(subscribe)))


def _discovery(kind: str) -> list[str]:
    """Be found as a NATS micro service, under this name alone."""
    return ["$SRV.PING", "$SRV.INFO", "$SRV.STATS", f"$SRV.*.areal-{kind}", f"$SRV.*.areal-{kind}.*"]


def _consume(stream: str, consumer: str) -> list[str]:
    """Pull from a consumer that exists, and settle what it delivered."""
    return [
        f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}",
        f"$JS.API.CONSUMER.INFO.{stream}.{consumer}",
        *_acks(stream, consumer),
    ]


def _acks(stream: str, consumer: str) -> list[str]:
    """Both shapes of an ack's subject: servers are changing to the second, which names domain and account first.

    The domain is ``_``, as we have none; a wildcard there would match the first shape of any other consumer's acks,
    and an ack can also ask for the next message.
    """
    return [f"$JS.ACK.{stream}.{consumer}.>", f"$JS.ACK._.*.{stream}.{consumer}.>"]


def _read(names: Names, *streams: str) -> list[str]:
    """Read these streams, and the run's keys, message by message: anybody's copy, or the leader's."""
    read = (*streams, f"KV_{names.bucket}", f"KV_{names.nodes_bucket}")
    granted: list[str] = []
    for stream in read:
        granted += _api(stream, "DIRECT.GET.{}", "DIRECT.GET.{}.>", "STREAM.MSG.GET.{}")
    return granted + _state(*read)


def _state(*streams: str) -> list[str]:
    """See how many messages and bytes these streams hold."""
    return [subject for stream in streams for subject in _api(stream, "STREAM.INFO.{}")]


def _keys(names: Names, *keys: str) -> list[str]:
    return [f"$KV.{names.bucket_of(key)}.{key}" for key in keys]


def _buckets(names: Names) -> list[str]:
    return [f"$KV.{bucket}.>" for bucket in (names.bucket, names.nodes_bucket)]


def _api(stream: str, *operations: str) -> list[str]:
    return [f"$JS.API.{operation.format(stream)}" for operation in operations]
