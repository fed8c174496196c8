"""The only file that spells a subject, a stream, a bucket or a key.

``<run>`` is ``[a-z0-9_-]+``; workflow names and ids are subject tokens (no dot, no space, no wildcard).
"""

import re
from dataclasses import dataclass

RUN_NAME = re.compile(r"[a-z0-9_-]{1,48}")
TOKEN = re.compile(r"[A-Za-z0-9_-]+")

ADMITTED = "admitted"
CHANGES = "changes"
CHECKPOINT = "checkpoint"
CONTROL = "control"
LAUNCHER = "launcher"
LINEAGE = "lineage"
NODES = "node."
"""Prefix of the keys of joined nodes."""
RUN_STATE = "run"
SERVERS = "server."
"""Prefix of the keys of inference servers."""
SETTINGS = "settings"


@dataclass(frozen=True, slots=True)
class Names:
    """Every name of one run."""

    run: str

    def __post_init__(self) -> None:
        if not RUN_NAME.fullmatch(self.run):
            raise ValueError(f"run name: got {self.run!r}, need 1 to 48 of a-z 0-9 _ -")

    # streams
    @property
    def tickets_stream(self) -> str:
        return f"AREAL_{self.run}_TICKETS"

    @property
    def trajectories_stream(self) -> str:
        return f"AREAL_{self.run}_TRAJECTORIES"

    @property
    def outcomes_stream(self) -> str:
        """Outcomes and the journal of cuts beside them: one log, so that their order is total."""
        return f"AREAL_{self.run}_OUTCOMES"

    @property
    def eval_stream(self) -> str:
        return f"AREAL_{self.run}_EVAL"

    @property
    def dead_stream(self) -> str:
        return f"AREAL_{self.run}_DEAD"

    @property
    def events_stream(self) -> str:
        """What has happened, as the roles and the broker tell it."""
        return f"AREAL_{self.run}_EVENTS"

    @property
    def bucket(self) -> str:
        """The key-value bucket with the run's state."""
        return f"AREAL_{self.run}"

    @property
    def nodes_bucket(self) -> str:
        """The bucket of the keys that nodes write, ``server.*`` and ``node.*``, with limits that are theirs alone."""
        return f"AREAL_{self.run}_NODES"

    def bucket_of(self, key: str) -> str:
        """Return the bucket that a key, or all that begin so, is in."""
        return self.nodes_bucket if key.startswith((SERVERS, NODES)) else self.bucket

    def account(self, role: str) -> str:
        """What the broker knows a role of this run as; the operator's holds the streams."""
        return f"AREAL_{self.run}_{_token(role).upper()}"

    # subjects of streams
    def tickets(self, workflow: str) -> str:
        return f"areal.{self.run}.tickets.{_token(workflow)}"

    def trajectories(self, workflow: str, group_id: str) -> str:
        return f"areal.{self.run}.trajectories.{_token(workflow)}.{_token(group_id)}"

    @property
    def all_trajectories(self) -> str:
        return f"areal.{self.run}.trajectories.>"

    @property
    def outcomes(self) -> str:
        return f"areal.{self.run}.outcomes"

    @property
    def cuts(self) -> str:
        return f"areal.{self.run}.cuts"

    @property
    def log(self) -> str:
        """Filter for everything in ``outcomes_stream``: outcomes and cuts in their one order."""
        return f"areal.{self.run}.*"

    @property
    def all_tickets(self) -> str:
        return f"areal.{self.run}.tickets.>"

    def eval_tickets(self, workflow: str) -> str:
        return f"areal.{self.run}.eval.tickets.{_token(workflow)}"

    def eval_results(self, workflow: str) -> str:
        return f"areal.{self.run}.eval.results.{_token(workflow)}"

    @property
    def dead_groups(self) -> str:
        """Groups whose last attempt has failed."""
        return f"areal.{self.run}.dead.group"

    @property
    def undecodable(self) -> str:
        """Messages that their reader could not use."""
        return f"areal.{self.run}.dead.undecodable"

    # core subjects
    @property
    def weights(self) -> str:
        """A new weights version was put into the bucket."""
        return f"areal.{self.run}.weights"

    def event(self, kind: str, role: str, instance: str = "0") -> str:
        """One kind of event (``role.lost``) of one process; a role may publish under its own name alone."""
        thing, what = kind.split(".")
        return f"areal.{self.run}.events.{_token(role)}.{_token(instance)}.{_token(thing)}.{_token(what)}"

    def metrics(self, role: str, instance: str = "0") -> str:
        """Metrics of one process of a role; a role may publish under its own name alone."""
        return f"areal.{self.run}.metrics.{_token(role)}.{_token(instance)}"

    @property
    def all_metrics(self) -> str:
        return f"areal.{self.run}.metrics.>"

    @property
    def all_events(self) -> str:
        return f"areal.{self.run}.events.>"

    def status(self, role: str, instance: str = "0") -> str:
        """Where one process answers what it does now."""
        return f"areal.{self.run}.status.{_token(role)}.{_token(instance)}"

    def control(self, order: str) -> str:
        """Where the controller takes an order."""
        return f"areal.{self.run}.control.{_token(order)}"

    # consumers
    @property
    def nodes_consumer(self) -> str:
        """Shared by all nodes."""
        return "nodes"

    @property
    def eval_nodes_consumer(self) -> str:
        return "eval-nodes"

    @property
    def eval_controller_consumer(self) -> str:
        return "eval-controller"

    def trainer_consumer(self, lineage: int) -> str:
        return f"trainer-{lineage}"

    # keys
    def weights_key(self, policy: str = "actor") -> str:
        return f"weights.{_token(policy)}"

    def server_key(self, server_id: str) -> str:
        return f"{SERVERS}{_token(server_id)}"

    def crew_key(self, crew: str) -> str:
        """How processes that live and die together fare; the launcher writes it."""
        return f"crew.{_token(crew)}"

    def node_key(self, node_id: str) -> str:
        """Who keeps the node that has joined under this id."""
        return f"{NODES}{_token(node_id)}"

    def fleet_key(self, node_id: str) -> str:
        """How many servers a node is to have; the operator writes it."""
        return f"fleet.{_token(node_id)}"


def _token(text: str) -> str:
    if not TOKEN.fullmatch(text):
        raise ValueError(f"subject token: got {text!r}, need letters, digits, _ or -")
    return text
