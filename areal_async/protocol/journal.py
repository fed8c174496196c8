"""What the log of cuts and outcomes says, read in its stored order.

Pure; kept by every reader (trainer ranks, controller). A ``begin`` entry fences: entries of an older
lineage that were stored after it do not count. A lineage inherits its predecessor's cuts and replaces
them from the first step that it cuts anew.

What it keeps does not grow with the run, but for some bytes per step: of a cut that is closed, how many groups it had,
and of a group that has ended, how (``id_sets``).
"""

from array import array
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import count, takewhile

import msgspec

from areal_async.protocol.fields import Count
from areal_async.protocol.id_sets import GroupIds, GroupIdsState
from areal_async.protocol.staleness import last_shared_step
from areal_async.protocol.types import Cut, CutGroup, CutKind, Outcome, OutcomeKind, Version


class JournalState(msgspec.Struct, kw_only=True):
    """What a ``Journal`` has read, as plain values. The cuts are told by where they are stored: they are large."""

    lineage: Count
    restored_step: Count
    cuts: dict[int, int]
    """Step -> stream sequence, in the order in which they were read."""
    settled: GroupIdsState
    untrained: dict[OutcomeKind, GroupIdsState]
    branches: dict[str, int]
    last_cut_sequence: Count
    given_up: list[CutGroup]
    """Those that have not ended since, or are recorded trained."""
    checkpoints: list[int]
    is_ended: bool
    checkpointed_step: Count
    closed_steps: list[int]
    num_closed: list[int]


@dataclass(slots=True)
class Journal:
    """The surviving cuts and the settling outcomes, in one lineage: the newest."""

    own_lineage: int = 0
    """A trainer's: what older ones tell of their checkpoints closes no cut after ``own_step``, as it replays those."""
    own_step: int = 0
    """Step of the checkpoint that the trainer begins from; outcomes may know of a later one."""
    lineage: int = 0
    restored_step: int = 0
    cuts: dict[int, Cut] = field(default_factory=dict)
    """Surviving cut of each step, but for those that are closed: a checkpoint holds the step, so that nobody trains it
    again, and each group's end is recorded."""
    settled: GroupIds = field(default_factory=GroupIds)
    """Groups with a settling outcome (``end_of``)."""
    branches: dict[str, int] = field(default_factory=dict)
    """Last common step with each older lineage, by the newest entry that has them (``Cut.branches``)."""
    last_cut_sequence: int = 0
    """Stream sequence of the newest journal entry: what the next one must follow."""
    given_up: dict[str, CutGroup] = field(default_factory=dict)
    """Groups of cuts that a branch gave up, by name, without their slots."""
    checkpoints: set[int] = field(default_factory=set)
    """Steps that the newest lineage is to checkpoint before it trains another."""
    is_ended: bool = False
    """The newest lineage has said that no further cut comes."""
    _untrained: dict[OutcomeKind, GroupIds] = field(default_factory=dict)
    """Groups that have ended otherwise than trained, by how."""
    _checkpointed_step: int = 0
    """Step of the newest checkpoint that an outcome names."""
    _goes_back: bool = False
    """``own_step`` was before a checkpoint that an outcome names: other readers may have let go of more."""
    _sequences: dict[int, int] = field(default_factory=dict)
    """Stream sequence of each of ``cuts``."""
    _closed_steps: "array[int]" = field(default_factory=lambda: array("q"))
    """Ascending."""
    _num_closed: "array[int]" = field(default_factory=lambda: array("q"))
    """Groups in the closed cuts up to each of these."""

    def add_cut(self, entry: Cut, *, sequence: int) -> bool:
        """Read a journal entry; say whether it counts."""
        self.last_cut_sequence = sequence
        if entry.lineage < self.lineage:
            return False
        if entry.kind is CutKind.BEGIN:
            self.lineage, self.restored_step, self.is_ended = entry.lineage, entry.step, False
            self.checkpoints.clear()
        elif entry.kind is CutKind.CHECKPOINT:
            self.checkpoints.add(entry.step)
        elif entry.kind is CutKind.END:
            self.is_ended = True
        elif entry.kind is CutKind.BRANCH:
            dropped = self._drop_cuts(entry.step + 1)
            self.given_up.update({group.group_id: group for cut in dropped for group in without_slots(cut).groups})
            self.branches = entry.branches
        else:
            self._drop_cuts(entry.step)
            self.cuts[entry.step] = entry
            self._sequences[entry.step] = sequence
            self.branches = entry.branches
        self.close_cuts()
        return True

    def _drop_cuts(self, first_step: int) -> list[Cut]:
        while self._closed_steps and self._closed_steps[-1] >= first_step:
            del self._closed_steps[-1], self._num_closed[-1]
        dropped = [step for step in self.cuts if step >= first_step]
        for step in dropped:
            self._sequences.pop(step, None)
        return [self.cuts.pop(step) for step in dropped]

    def close_cuts(self) -> None:
        """Let go of cuts, in the order of their steps, that a checkpoint holds and of which each group has ended."""
        for step in sorted(self.cuts):
            groups = self.cuts[step].groups
            if step > self._checkpointed_step or any(group.group_id not in self.settled for group in groups):
                break
            del self.cuts[step]
            self._sequences.pop(step, None)
            self._num_closed.append(len(groups) + (self._num_closed[-1] if self._num_closed else 0))
            self._closed_steps.append(step)
        self.checkpoints = {step for step in self.checkpoints if step >= self._checkpointed_step}

    def remove_from_cuts(self, group_id: str) -> None:
        """Take a group that ended otherwise out of the newest cut that names it."""
        for step in sorted(self.cuts, reverse=True):
            cut = self.cuts[step]
            kept = [group for group in cut.groups if group.group_id != group_id]
            if len(kept) < len(cut.groups):
                self.cuts[step] = msgspec.structs.replace(cut, groups=kept)
                return

    def state(self) -> "JournalState | None":
        """Return what was read as plain values, without the cuts; None where other readers may hold less."""
        if self._goes_back:
            return None
        return JournalState(
            lineage=self.lineage,
            restored_step=self.restored_step,
            cuts={step: self._sequences[step] for step in self.cuts},
            settled=self.settled.state(),
            untrained={kind: groups.state() for kind, groups in self._untrained.items()},
            branches=self.branches,
            last_cut_sequence=self.last_cut_sequence,
            given_up=[group for name, group in self.given_up.items() if self._may_be_trained(name)],
            checkpoints=sorted(self.checkpoints),
            is_ended=self.is_ended,
            checkpointed_step=self._checkpointed_step,
            closed_steps=list(self._closed_steps),
            num_closed=list(self._num_closed),
        )

    @classmethod
    def of_state(
        cls, state: "JournalState", cuts: Iterable[Cut], *, own_lineage: int = 0, own_step: int = 0
    ) -> "Journal":
        """Undo ``state``: what is read from here on comes to the same as if all had been read.

        Args:
            cuts: those that it names, as they were read, in any order.

        Raises:
            ValueError: it is none, those are not its cuts, or one who begins from ``own_step`` needs older ones.
        """
        by_step = {cut.step: cut for cut in cuts}
        if by_step.keys() != state.cuts.keys() or len(state.closed_steps) != len(state.num_closed):
            raise ValueError(f"got cuts of {sorted(by_step)}, need those of {sorted(state.cuts)}")
        if own_lineage and state.checkpointed_step > own_step:
            raise ValueError(f"it is of a checkpoint at step {state.checkpointed_step}, after step {own_step}")
        return cls(
            own_lineage=own_lineage,
            own_step=own_step,
            lineage=state.lineage,
            restored_step=state.restored_step,
            cuts={step: by_step[step] for step in state.cuts},
            settled=GroupIds.of_state(state.settled),
            branches=state.branches,
            last_cut_sequence=state.last_cut_sequence,
            given_up={group.group_id: group for group in state.given_up},
            checkpoints=set(state.checkpoints),
            is_ended=state.is_ended,
            _untrained={kind: GroupIds.of_state(groups) for kind, groups in state.untrained.items()},
            _checkpointed_step=state.checkpointed_step,
            _sequences=dict(state.cuts),
            _closed_steps=array("q", state.closed_steps),
            _num_closed=array("q", state.num_closed),
        )

    def add_outcome(self, outcome: Outcome) -> bool:
        """Read an outcome; say whether it settles its group now: the first one does, or what takes a training back."""
        group_id, kind = outcome.group_id, outcome.kind
        if outcome.lineage < self.lineage or not kind.settles:
            return False
        takes_back = kind is OutcomeKind.ROLLED_BACK and self.end_of(group_id) is OutcomeKind.TRAINED
        if group_id in self.settled and not takes_back:
            return False
        self.settled.add(group_id)
        if kind is OutcomeKind.TRAINED:
            told = outcome.step
            if outcome.lineage < self.own_lineage and told > self.own_step:
                told, self._goes_back = self.own_step, True
            self._checkpointed_step = max(self._checkpointed_step, told)
        else:
            self._untrained.setdefault(kind, GroupIds()).add(group_id)
        return True

    def end_of(self, group_id: str) -> OutcomeKind | None:
        """Return how a group has ended; None while it has not."""
        if group_id not in self.settled:
            return None
        return next((kind for kind, groups in self._untrained.items() if group_id in groups), OutcomeKind.TRAINED)

    def is_cut(self, step: int) -> bool:
        """Say whether a step has a surviving cut."""
        return step in self.cuts or bool(self._num_closed_steps(step) > self._num_closed_steps(step - 1))

    @property
    def last_step(self) -> int:
        """The last one that has a surviving cut; that of the checkpoint where none has."""
        closed = self._closed_steps[-1:] or [self.restored_step]
        return max(self.cuts, default=closed[0])

    def num_cut_groups(self, *, through_step: int) -> int:
        """Return how many groups the surviving cuts of steps up to ``through_step`` hold."""
        num_steps = self._num_closed_steps(through_step)
        closed = self._num_closed[num_steps - 1] if num_steps else 0
        return closed + sum(len(cut.groups) for step, cut in self.cuts.items() if step <= through_step)

    def _num_closed_steps(self, through_step: int) -> int:
        return bisect_right(self._closed_steps, through_step)

    def steps_to_replay(self) -> list[int]:
        """The journalled steps after the checkpoint, without a gap."""
        return list(takewhile(self.cuts.__contains__, count(self.restored_step + 1)))

    def cut_to_replay(self, step: int) -> Cut:
        """Return a step's cut without the groups that fell out of it when it was first trained."""
        cut = self.cuts[step]
        kept = [group for group in cut.groups if self._may_be_trained(group.group_id)]
        return msgspec.structs.replace(cut, groups=kept)

    def without_end(self) -> list[CutGroup]:
        """Return the groups of given-up cuts that are not cut again, and not recorded, or recorded trained.

        The lineage that gave them up did not record it; with their messages gone nobody else would know of them.
        """
        cut_again = self.open_groups()
        given_up = self.given_up.items()
        return [group for name, group in given_up if self._may_be_trained(name) and name not in cut_again]

    def _may_be_trained(self, group_id: str) -> bool:
        return self.end_of(group_id) in (None, OutcomeKind.TRAINED)

    def last_shared_step(self, version: Version) -> int:
        """Return the last step up to ``version`` that the newest lineage has in common with it."""
        branches = {int(lineage): step for lineage, step in self.branches.items()}
        return last_shared_step(version, lineage=self.lineage, branches=branches)

    def survives(self, version: Version) -> bool:
        """Say whether the newest lineage stands on a version: no branch since gave it up."""
        return self.last_shared_step(version) == version.step

    def unknown_to(self, step: int, trained: Iterable[str]) -> list[str]:
        """Return which groups, trained in ``step`` as a checkpoint says, its surviving cut does not hold any more.

        Of a closed cut, those that were trained in no step: what ended so is not trained again.
        """
        if step in self.cuts:
            held = {group.group_id for group in self.cuts[step].groups}
            return sorted(one for one in set(trained) if one not in held or not self._may_be_trained(one))
        return sorted(one for one in trained if not self.is_cut(step) or self.end_of(one) is not OutcomeKind.TRAINED)

    def fits(self, version: Version, trained: Iterable[tuple[int, list[str]]]) -> bool:
        """Say whether a checkpoint holds nothing that was given up since, or ended otherwise.

        Args:
            trained: steps with the groups that it was trained on.
        """
        return self.survives(version) and not any(self.unknown_to(step, groups) for step, groups in trained)

    def open_groups(self) -> set[str]:
        """Return the groups of the surviving cuts; those of closed ones are settled."""
        return {group.group_id for cut in self.cuts.values() for group in cut.groups}


def without_slots(entry: Cut) -> Cut:
    """Return an entry with its groups' names alone, for readers that train nothing."""
    return msgspec.structs.replace(entry, groups=[msgspec.structs.replace(one, slots=[]) for one in entry.groups])
