"""What a run has left, as records: the readers fill these in, and the arithmetic of the promises reads nothing else."""

from dataclasses import dataclass, field
from typing import Any, Literal

from areal_async.algorithms.advantages import AdvantageRule
from areal_async.config.settings import CurriculumSettings
from areal_async.controller.sampler import Sampler, TaskShare, sampler_of
from areal_async.protocol.publish_log import Produced, ProducerSequence
from areal_async.protocol.types import Admitted, Cut, GroupId, Outcome, ReplyReward
from areal_async.trainer.engine.digests import Damage
from areal_async.versions.restore_points import TrainedGroups


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskRules:
    """The rules that are a task's own."""

    num_rows: int
    ratio: float = 1.0
    """Where the record has no mix."""
    group_size: int
    min_group_size: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """What can be said of the advantages that were trained."""

    rule: AdvantageRule = field(default_factory=AdvantageRule)
    """Rule by which rewards become advantages, or with which the rest begins."""
    made_by: str = ""
    """What else makes them, so that rewards do not say them; empty for nothing."""
    centred_in: Literal["group", "step", ""] = ""
    """Where that leaves them without a mean: over siblings, or over trained tokens, of which the variance is 1 then."""
    is_unknown: bool = False
    """Whether nothing can be said of what siblings they were compared with."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """The settings that the promises speak of."""

    group_size: int
    """Siblings of a group whose task is not known: the least of any task."""
    min_group_size: int
    """Scored siblings that a group needs; the least of any task."""
    max_staleness: int
    max_attempts: int
    max_groups_in_flight: int
    advantages: Baseline
    seed: int
    tasks: tuple[TaskRules, ...] = ()
    """Tasks in the order of the settings; none when the data cannot be read."""
    why_no_rows: str = ""
    curriculum: CurriculumSettings | None = None
    """Curriculum that passes prompts over; None where nothing does."""

    @property
    def num_rows(self) -> int:
        """Rows of all tasks together; 0 when the data cannot be read."""
        return sum(task.num_rows for task in self.tasks)

    def of(self, group_id: str) -> "Rules | TaskRules":
        """Return the sizes of a group."""
        index = GroupId.parse(group_id).index
        for task in self.tasks:
            if index < task.num_rows:
                return task
            index -= task.num_rows
        return self


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredSlot:
    """A slot of a message that the broker still has."""

    group_id: str
    sibling: int
    sample_uid: str
    damage: str = ""
    """Reason for which its payload cannot be used; empty for none."""
    token_faults: tuple[str, ...] = ()
    """Faults of the versions of its tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchivedSlot:
    """One row of the archive: a slot in the step that trained it."""

    step: int
    lineage: int
    position: int
    group_id: str
    sibling: int
    sample_uid: str
    reward: float
    advantage: float
    num_sampled: int
    num_by_version: dict[int, int]
    """Packed version -> sampled tokens that carry it."""
    token_faults: tuple[str, ...] = ()
    image_faults: tuple[str, ...] = ()
    """What is wrong with the archived images that it shows."""
    credits: tuple[ReplyReward, ...] = ()
    credit_advantages: tuple[float, ...] = ()
    """Advantage of each credit; ``advantage`` is then their mean."""
    by_token: tuple[float, float, int] | None = None
    """Sum of the trained tokens' advantages, of their squares, and how many they are, where they differ."""

    @property
    def advantages(self) -> tuple[float, ...]:
        """Advantages of the credited replies, or the one of a slot without credits."""
        return self.credit_advantages or (self.advantage,)

    @property
    def name(self) -> str:
        """The slot, as findings name it."""
        return f"{self.group_id}.{self.sibling}"


@dataclass(kw_only=True, slots=True)
class RunRecord:
    """Everything that a run has left. Sequence numbers are not part of it: they can be reused after corruption."""

    rules: Rules
    is_live: bool = False
    is_finished: bool = False
    """Whether the run's own record says so."""
    admitted: Admitted = field(default_factory=Admitted)
    """Record of admission as it was before anything else was read: what it counts had its ticket published by then."""
    admitted_last: Admitted = field(default_factory=Admitted)
    """Record of admission as it was after everything else was read."""
    tickets: set[str] = field(default_factory=set)
    """Groups whose ticket is not acked yet."""
    stored: list[StoredSlot] = field(default_factory=list)
    stamps: list[ProducerSequence] = field(default_factory=list)
    """Producer and number of each stored message."""
    unreadable_messages: list[str] = field(default_factory=list)
    """Reasons for which headers of stored messages cannot be read."""
    log: list[Cut | Outcome] = field(default_factory=list)
    """Entries in the stored order."""
    num_entries_before_messages: int = 0
    """The part of the log that was there before the stored messages were read."""
    dead_letters: list[Outcome] = field(default_factory=list)
    produced: dict[str, Produced] = field(default_factory=dict)
    """Producer -> its receipts."""
    archive: list[ArchivedSlot] = field(default_factory=list)
    """Rows without what an abandoned lineage trained."""
    metrics: list[dict[str, Any]] = field(default_factory=list)
    ledger: TrainedGroups | None = None
    """None before the first checkpoint."""
    absent_streams: list[str] = field(default_factory=list)
    """Streams that the broker does not have, or not any more."""
    unreadable_files: list[str] = field(default_factory=list)
    """Files of the archive and the checkpoints, each with its reason."""
    damaged_checkpoints: list[Damage] = field(default_factory=list)
    """Checkpoints whose files are not what was written, each with its reason."""
    notes: list[str] = field(default_factory=list)
    """Sentences about what else was noticed."""

    @property
    def sampler(self) -> Sampler:
        """Order in which prompts were admitted, given the mixes of the record; there must be rows."""
        shares = [TaskShare(task.num_rows, task.ratio) for task in self.rules.tasks]
        return sampler_of(shares, seed=self.rules.seed, admitted=self.admitted_last)
