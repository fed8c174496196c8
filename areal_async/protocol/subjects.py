"""The only file that spells a subject, a stream, a bucket or a key.

``<run>`` is ``[a-z0-9_-]+``; workflow names and ids are subject tokens (no dot, no space, no wildcard).
"""

import re
from typing import Final, Literal

RUN_NAME = re.compile(r"[a-z0-9_-]{1,48}")
TOKEN = re.compile(r"[A-Za-z0-9_-]+")

ACCOUNTS = "accounts"
ADMITTED = "admitted"
ARM_STATES = "arm."
"""Prefix of the keys of what arms have come to."""
ARMS = "arms"
CARD = "card"
CHANGES = "changes"
CHECKPOINT = "checkpoint"
CONTROL = "control"
EVALUATIONS = "eval."
"""Prefix of the keys of evaluations' records."""
HOSTS = "hosts"
JOURNAL = "journal"
LAUNCHER = "launcher"
LINEAGE = "lineage"
NODES = "node."
"""Prefix of the keys of joined nodes."""
ROLLBACK = "rollback"
RUN_STATE = "run"
SERVERS = "server."
"""Prefix of the keys of inference servers."""
SETTINGS = "settings"


class Names:
    """Every name of one run."""

    def __init__(self, run: str) -> None:
        if not RUN_NAME.fullmatch(run):
            raise ValueError(f"run name: got {run!r}, need 1 to 48 of a-z 0-9 _ -")
        self.run: Final = run

        # streams
        self.tickets_stream: Final = f"AREAL_{run}_TICKETS"
        self.trajectories_stream: Final = f"AREAL_{run}_TRAJECTORIES"
        self.outcomes_stream: Final = f"AREAL_{run}_OUTCOMES"
        """Outcomes and the journal of cuts beside them: one log, so that their order is total."""
        self.eval_stream: Final = f"AREAL_{run}_EVAL"
        self.dead_stream: Final = f"AREAL_{run}_DEAD"
        self.events_stream: Final = f"AREAL_{run}_EVENTS"
        """What has happened, as the roles and the broker tell it."""
        self.images_stream: Final = f"AREAL_{run}_IMAGES"
        """What groups look at, by group and hash."""
        self.bucket: Final = f"AREAL_{run}"
        """The key-value bucket with the run's state."""
        self.nodes_bucket: Final = f"AREAL_{run}_NODES"
        """The bucket of the keys that nodes write, ``server.*`` and ``node.*``, with limits that are theirs alone."""

        # subjects of streams
        self.all_trajectories: Final = f"areal.{run}.trajectories.>"
        self.all_images: Final = f"areal.{run}.images.*.*"
        self.eval_groups: Final = "eval-"
        """Begins what stands for a group in the names of images of held-out rows; no group's id begins so."""
        self.outcomes: Final = f"areal.{run}.outcomes"
        self.cuts: Final = f"areal.{run}.cuts"
        self.log: Final = f"areal.{run}.*"
        """Filter for everything in ``outcomes_stream``: outcomes and cuts in their one order."""
        self.all_tickets: Final = f"areal.{run}.tickets.>"
        self.dead_groups: Final = f"areal.{run}.dead.group"
        """Groups whose last attempt has failed."""
        self.undecodable: Final = f"areal.{run}.dead.undecodable"
        """Messages that their reader could not use."""

        # core subjects
        self.weights: Final = f"areal.{run}.weights"
        """A new weights version was put into the bucket."""
        self.all_metrics: Final = f"areal.{run}.metrics.>"
        self.all_events: Final = f"areal.{run}.events.>"

        # consumers
        self.nodes_consumer: Final = "nodes"
        """Shared by all nodes."""
        self.eval_nodes_consumer: Final = "eval-nodes"
        self.eval_controller_consumer: Final = "eval-controller"
        self.arm_nodes_consumer: Final = "arm-nodes"
        self.arm_controller_consumer: Final = "arm-controller"

    def bucket_of(self, key: str) -> str:
        """Return the bucket that a key, or all that begin so, is in."""
        return self.nodes_bucket if key.startswith((SERVERS, NODES)) else self.bucket

    def account(self, role: str) -> str:
        """What the broker knows a role of this run as; the operator's holds the streams."""
        return f"AREAL_{self.run}_{_token(role).upper()}"

    def tickets(self, workflow: str) -> str:
        return f"areal.{self.run}.tickets.{_token(workflow)}"

    def trajectories(self, workflow: str, group_id: str) -> str:
        return f"areal.{self.run}.trajectories.{_token(workflow)}.{_token(group_id)}"

    def images(self, group_id: str, sha256: str) -> str:
        """One image of one group; ``*`` for all of the group's."""
        return f"areal.{self.run}.images.{_token(group_id)}.{sha256 if sha256 == '*' else _token(sha256)}"

    def eval_group(self, eval_id: str, index: int | Literal[""]) -> str:
        """What stands for a group in the names of a held-out row's images in one evaluation; without the row, how that
        of each begins."""
        return f"{self.eval_groups}{eval_id}-{index}"

    def eval_tickets(self, workflow: str) -> str:
        return f"areal.{self.run}.eval.tickets.{_token(workflow)}"

    def eval_results(self, workflow: str) -> str:
        return f"areal.{self.run}.eval.results.{_token(workflow)}"

    def arm_tickets(self, arm_id: str) -> str:
        """Prompts of one arm; ``*`` for those of all."""
        return f"areal.{self.run}.eval.arms.tickets.{arm_id if arm_id == '*' else _token(arm_id)}"

    def arm_results(self, arm_id: str) -> str:
        """What was made of them."""
        return f"areal.{self.run}.eval.arms.results.{arm_id if arm_id == '*' else _token(arm_id)}"

    def arm_answers(self, arm_id: str) -> str:
        """What it has answered alone, for a comparison."""
        return f"areal.{self.run}.eval.arms.answers.{arm_id if arm_id == '*' else _token(arm_id)}"

    def arm_messages(self, arm_id: str) -> str:
        """All of these."""
        return f"areal.{self.run}.eval.arms.*.{arm_id if arm_id == '*' else _token(arm_id)}"

    def event(self, kind: str, role: str, instance: str = "0") -> str:
        """One kind of event (``role.lost``) of one process; a role may publish under its own name alone."""
        thing, what = kind.split(".")
        return f"areal.{self.run}.events.{_token(role)}.{_token(instance)}.{_token(thing)}.{_token(what)}"

    def metrics(self, role: str, instance: str = "0") -> str:
        """Metrics of one process of a role; a role may publish under its own name alone."""
        return f"areal.{self.run}.metrics.{_token(role)}.{_token(instance)}"

    def status(self, role: str, instance: str = "0") -> str:
        """Where one process answers what it does now."""
        return f"areal.{self.run}.status.{_token(role)}.{_token(instance)}"

    def control(self, order: str) -> str:
        """Where the controller takes an order."""
        return f"areal.{self.run}.control.{_token(order)}"

    def trainer_consumer(self, lineage: int) -> str:
        return f"trainer-{lineage}"

    # keys
    def weights_key(self, policy: str = "actor") -> str:
        return f"weights.{_token(policy)}"

    def evaluation_key(self, step: int, workflow: str) -> str:
        """The record of one task's evaluation, by the step at which it was due."""
        return f"{EVALUATIONS}{step}.{_token(workflow)}"

    def server_key(self, server_id: str) -> str:
        return f"{SERVERS}{_token(server_id)}"

    def crew_key(self, crew: str) -> str:
        """How processes that live and die together fare; the launcher writes it."""
        return f"crew.{_token(crew)}"

    def node_key(self, node_id: str) -> str:
        """Who keeps the node that has joined under this id."""
        return f"{NODES}{_token(node_id)}"

    def arm_key(self, name: str) -> str:
        """What an arm has come to; the controller writes it."""
        return f"{ARM_STATES}{_token(name)}"

    def fleet_key(self, node_id: str) -> str:
        """How many servers a node is to have; the operator writes it."""
        return f"fleet.{_token(node_id)}"


def _token(text: str) -> str:
    if not TOKEN.fullmatch(text):
        raise ValueError(f"subject token: got {text!r}, need letters, digits, _ or -")
    return text
