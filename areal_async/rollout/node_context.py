"""What every ticket of a node works with."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import anyio
import structlog

from areal_async.api import GroupWorkflow, Workflow
from areal_async.bus import Bus
from areal_async.config.settings import Settings
from areal_async.errors import UserError
from areal_async.process.pausable_clock import PausableClock
from areal_async.protocol.publish_log import PublishLog
from areal_async.protocol.types import Slot, SlotStatus
from areal_async.rollout.arms import NodeArms
from areal_async.rollout.backpressure import Backpressure
from areal_async.rollout.endpoint.policy import PolicyMaker
from areal_async.rollout.named_policies import FrozenModel, FrozenReward
from areal_async.rollout.workflow_call import TaskWorkflow

READS_AT_ONCE = 4
"""Each takes up to 15 MB; the broker cuts off who leaves 128 MB unread."""

log = structlog.get_logger()


@dataclass
class Counts:
    """What the node has done, for its metrics. The totals only grow."""

    num_groups_running: int = 0
    num_trajectories_running: int = 0
    num_scored: int = 0
    num_failed: int = 0
    num_rejected: int = 0
    last_failure: str = ""

    def add(self, slot: Slot) -> None:
        """Count a finished sibling."""
        match slot.status:
            case SlotStatus.SCORED:
                self.num_scored += 1
            case SlotStatus.REJECTED:
                self.num_rejected += 1
            case SlotStatus.FAILED:
                self.num_failed += 1
                self.last_failure = slot.reason
                log.warning("trajectory.failed", sample_uid=slot.sample_uid, reason=slot.reason)


@dataclass(kw_only=True)
class NodeContext(PolicyMaker):
    """What every ticket of a node works with."""

    settings: Settings
    bus: Bus
    node_id: str
    workflows: Mapping[str, Workflow | GroupWorkflow]
    frozen: Mapping[str, FrozenModel | FrozenReward] = field(default_factory=dict)
    """The models that are not trained, by the names of their policies."""
    arms: NodeArms | None = None
    """None where no node runs, as in a trial."""
    clock: PausableClock = field(default_factory=PausableClock)
    """What deadlines of episodes go by."""
    counts: Counts = field(default_factory=Counts)
    backpressure: Backpressure = field(default_factory=Backpressure)
    reading: anyio.CapacityLimiter = field(default_factory=lambda: anyio.CapacityLimiter(READS_AT_ONCE))
    """Bounds the payloads on their way here: after a crash every ticket comes again at once."""
    publish_log: PublishLog = field(init=False)
    now: Settings = field(init=False)
    """With what operators have changed. Training groups begin with it; evaluations stay with ``settings``, as their
    numbers are compared over the whole run."""

    def __post_init__(self) -> None:
        self._called: dict[str, TaskWorkflow] = {}
        """Each workflow as it was last called: all groups of a task look alike until its settings change."""
        self.now = self.settings
        self.publish_log = PublishLog(self.settings.run_directory, self.node_id)

    def workflow(self, name: str, settings: Settings) -> TaskWorkflow:
        """Return the workflow of a ticket, as it is called with these settings.

        Raises:
            UserError: the settings of this node do not have it.
        """
        if name not in self.workflows:
            raise UserError(
                f"ticket: got workflow {name!r}, this node has {sorted(self.workflows)}; give all one config"
            )
        called = self._called.get(name)
        if called is None or called.settings is not settings:
            called = self._called[name] = TaskWorkflow(name, self.workflows[name], settings, self.frozen)
        return called
