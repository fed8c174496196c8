"""What the log of cuts and outcomes says, read in its stored order.

Pure; kept by every reader (trainer ranks, controller). A ``begin`` entry fences: entries of an older
lineage that were stored after it do not count. A lineage inherits its predecessor's cuts and replaces
them from the first step that it cuts anew.
"""

from dataclasses import dataclass, field

from areal_async.types import Cut, CutKind, Outcome


@dataclass(slots=True)
class Journal:
    """The surviving cuts and the settling outcomes, in one lineage: the newest."""

    lineage: int = 0
    restored_step: int = 0
    cuts: dict[int, Cut] = field(default_factory=dict)
    """Surviving cut of each step."""
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    """The first settling outcome of each group."""
    last_cut_sequence: int = 0
    """Stream sequence of the newest journal entry: what the next one must follow."""
    is_ended: bool = False
    """The newest lineage has said that no further cut comes."""

    def add_cut(self, entry: Cut, *, sequence: int) -> bool:
        """Read a journal entry; say whether it counts."""
        self.last_cut_sequence = sequence
        if entry.lineage < self.lineage:
            return False
        if entry.kind is CutKind.BEGIN:
            self.lineage, self.restored_step, self.is_ended = entry.lineage, entry.step, False
        elif entry.kind is CutKind.END:
            self.is_ended = True
        else:
            for step in [step for step in self.cuts if step >= entry.step]:
                del self.cuts[step]
            self.cuts[entry.step] = entry
        return True

    def add_outcome(self, outcome: Outcome) -> bool:
        """Read an outcome; say whether it settles its group now."""
        if outcome.lineage < self.lineage or not outcome.kind.settles or outcome.group_id in self.outcomes:
            return False
        self.outcomes[outcome.group_id] = outcome
        return True

    @property
    def last_step(self) -> int:
        """The newest step with a surviving cut, or the restored one."""
        return max(self.cuts, default=self.restored_step)

    def steps_to_replay(self) -> list[int]:
        """The journalled steps after the checkpoint, without a gap."""
        steps: list[int] = []
        while self.restored_step + len(steps) + 1 in self.cuts:
            steps.append(self.restored_step + len(steps) + 1)
        return steps

    def trained_groups(self, *, through_step: int) -> set[str]:
        """Ids in the surviving cuts of steps up to ``through_step``."""
        return {group.group_id for step, cut in self.cuts.items() if step <= through_step for group in cut.groups}
