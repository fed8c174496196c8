"""What the log of cuts and outcomes says, read in its stored order.

Pure; kept by every reader (trainer ranks, controller). A ``begin`` entry fences: entries of an older
lineage that were stored after it do not count. A lineage inherits its predecessor's cuts and replaces
them from the first step that it cuts anew.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from areal_async.types import Cut, CutGroup, CutKind, Outcome, OutcomeKind


@dataclass(slots=True)
class Journal:
    """The surviving cuts and the settling outcomes, in one lineage: the newest."""

    lineage: int = 0
    restored_step: int = 0
    cuts: dict[int, Cut] = field(default_factory=dict)
    """Surviving cut of each step."""
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    """The first settling outcome of each group."""
    branches: dict[str, int] = field(default_factory=dict)
    """Where lineages parted, by the newest entry that says so (``Cut.branches``)."""
    last_cut_sequence: int = 0
    """Stream sequence of the newest journal entry: what the next one must follow."""
    given_up: dict[str, CutGroup] = field(default_factory=dict)
    """Groups of cuts that a branch gave up, by name."""
    checkpoints: set[int] = field(default_factory=set)
    """Steps that the newest lineage is to checkpoint before it trains another."""
    is_ended: bool = False
    """The newest lineage has said that no further cut comes."""

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
            self.given_up.update({group.group_id: group for cut in dropped for group in cut.groups})
            self.branches = entry.branches
        else:
            self._drop_cuts(entry.step)
            self.cuts[entry.step] = entry
            self.branches = entry.branches
        return True

    def _drop_cuts(self, first_step: int) -> list[Cut]:
        return [self.cuts.pop(step) for step in list(self.cuts) if step >= first_step]

    def remove_from_cuts(self, group_id: str) -> None:
        """Take a group that ended otherwise out of the newest cut that names it."""
        for step in sorted(self.cuts, reverse=True):
            cut = self.cuts[step]
            kept = [group for group in cut.groups if group.group_id != group_id]
            if len(kept) < len(cut.groups):
                self.cuts[step] = msgspec.structs.replace(cut, groups=kept)
                return

    def forget_slots(self, *, through_step: int) -> None:
        """Keep only the groups' names of cuts that no replay will ask for any more."""
        for step, cut in self.cuts.items():
            if step <= through_step and cut.groups and cut.groups[0].slots:
                self.cuts[step] = without_slots(cut)

    def add_outcome(self, outcome: Outcome) -> bool:
        """Read an outcome; say whether it settles its group now."""
        if outcome.lineage < self.lineage or not outcome.kind.settles or outcome.group_id in self.outcomes:
            return False
        self.outcomes[outcome.group_id] = outcome
        return True

    def steps_to_replay(self) -> list[int]:
        """The journalled steps after the checkpoint, without a gap."""
        steps: list[int] = []
        while self.restored_step + len(steps) + 1 in self.cuts:
            steps.append(self.restored_step + len(steps) + 1)
        return steps

    def cut_to_replay(self, step: int) -> Cut:
        """Return a step's cut without the groups that fell out of it when it was first trained."""
        cut = self.cuts[step]
        kept = [group for group in cut.groups if self._may_train(group.group_id)]
        return msgspec.structs.replace(cut, groups=kept)

    def without_end(self) -> list[CutGroup]:
        """Return the groups of given-up cuts that are neither recorded nor cut again.

        Whoever gave them up did not come to record it; with their messages gone nobody else would know of them.
        """
        cut_again = self.trained_groups(through_step=max(self.cuts, default=0))
        return [group for name, group in self.given_up.items() if name not in self.outcomes and name not in cut_again]

    def unknown_to(self, step: int, trained: Iterable[str]) -> list[str]:
        """Return which groups, trained in ``step`` as a checkpoint says, its surviving cut does not hold."""
        cut = self.cuts.get(step)
        return sorted(set(trained) - {group.group_id for group in cut.groups} if cut else set(trained))

    def _may_train(self, group_id: str) -> bool:
        outcome = self.outcomes.get(group_id)
        return outcome is None or outcome.kind is OutcomeKind.TRAINED

    def trained_groups(self, *, through_step: int) -> set[str]:
        """Ids in the surviving cuts of steps up to ``through_step``."""
        return {group.group_id for step, cut in self.cuts.items() if step <= through_step for group in cut.groups}


def without_slots(entry: Cut) -> Cut:
    """Return an entry with its groups' names alone, for readers that train nothing."""
    return msgspec.structs.replace(entry, groups=[msgspec.structs.replace(one, slots=[]) for one in entry.groups])
