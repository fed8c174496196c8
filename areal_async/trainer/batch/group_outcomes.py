"""What becomes of groups, as rules: which outcomes are to be stored, and which messages may then be acked.

Pure. A group is recorded once per lineage, whatever is asked for it, and nothing of a group is handed over to be
acked before its outcome is stored (``note_recorded``). A trained group's outcome waits for its checkpoint.
"""

from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

import msgspec

from areal_async.protocol.id_sets import GroupIds
from areal_async.protocol.types import Cut, CutGroup, Outcome, OutcomeKind, StoredMessage, mean
from areal_async.trainer.batch.cut import OpenGroup
from areal_async.trainer.batch.inventory import Inventory

TAUGHT_NOTHING = (OutcomeKind.FILTERED, OutcomeKind.STALE)
"""Ends of whole groups that are not trained."""

D = TypeVar("D")
"""A delivery: opaque here."""


class GroupOutcomes(Generic[D]):
    """The outcomes of one lineage."""

    def __init__(self, inventory: Inventory[D], *, lineage: int, max_attempts: int, recorded: Iterable[str]) -> None:
        """``recorded``: groups that have an outcome already."""
        self.inventory = inventory
        self.lineage = lineage
        self._max_attempts = max_attempts
        self._recorded = GroupIds(recorded)
        self._in_cuts: dict[str, CutGroup] = {}
        """Groups in cuts that no checkpoint holds, should they fall out."""
        self._num_whole = 0
        self._num_stale = 0
        self._num_failed = 0
        self.unacked_cuts: dict[int, Cut] = {}
        """Cuts that no checkpoint holds yet."""
        inventory.close(self._recorded)

    # what it is told

    def hold(self, cut: Cut) -> None:
        """Take a journalled cut: its groups wait for the checkpoint that will contain them."""
        self.unacked_cuts[cut.step] = cut
        self.take(cut.groups)

    def take(self, groups: Sequence[CutGroup]) -> None:
        """Take groups that were cut once: they are not cut again."""
        self.inventory.close(group.group_id for group in groups)
        self._in_cuts.update({group.group_id: group for group in groups})

    def is_cut(self, group_id: str) -> bool:
        """Say whether a group is in a cut that no checkpoint holds."""
        return group_id in self._in_cuts

    def receive(self, message: StoredMessage, delivery: D) -> list[Outcome]:
        """Take a stored message; return what is to be stored of its slots that cannot be used. It settles nothing."""
        unusable = self.inventory.add_message(message, delivery)
        return [msgspec.structs.replace(outcome, lineage=self.lineage) for outcome in unusable]

    def count_whole(self) -> None:
        """Note a group with enough scored slots: failures before and after it do not follow one another."""
        self._num_whole += 1

    def take_counts(self) -> tuple[int, int]:
        """Return how many groups were dropped as stale, and how many failed, since the last call."""
        counts = self._num_stale, self._num_failed
        self._num_stale = self._num_failed = 0
        return counts

    def note_recorded(self, outcomes: Iterable[Outcome]) -> None:
        """Note outcomes that are stored: what has come for their groups may be acked from now on."""
        for outcome in outcomes:
            self._recorded.add(outcome.group_id)
            self._num_stale += outcome.kind is OutcomeKind.STALE
            if _has_failed(outcome):
                self._num_failed += 1
                self._num_whole = 0

    # what is to be done: store what the first ones return, then ack what the last ones return

    def of_checkpoint(self, step: int) -> list[Outcome]:
        """Return what is to be stored of the groups that the checkpoint of ``step`` contains.

        It must be on disk, and the newest by the bucket. Groups that fell out of their cut have an outcome
        already, which stays.
        """
        return [
            Outcome(group_id=group.group_id, kind=OutcomeKind.TRAINED, lineage=self.lineage, step=cut.step)
            for cut in self._cuts_through(step)
            for group in cut.groups
            if group.group_id not in self._recorded
        ]

    def of_untrained(self, group_ids: Iterable[str], kind: OutcomeKind, *, reason: str, step: int) -> list[Outcome]:
        """End groups without training them; return what is to be stored of it."""
        outcomes = [
            self._untrained(group_id, kind, reason=reason, step=step)
            for group_id in group_ids
            if group_id not in self._recorded
        ]
        self.inventory.close(outcome.group_id for outcome in outcomes)
        return outcomes

    def give_up_cuts(self, *, after_step: int) -> dict[int, list[str]]:
        """Let go of the cuts beyond ``after_step``, which no checkpoint will contain; return their groups by step."""
        steps = [step for step in self.unacked_cuts if step > after_step]
        return {step: [group.group_id for group in self.unacked_cuts.pop(step).groups] for step in sorted(steps)}

    def release(self, group_ids: Iterable[str]) -> list[D]:
        """Hand over, to be acked, what has come for those groups whose outcome is stored."""
        return self.inventory.release(group_id for group_id in group_ids if group_id in self._recorded)

    def release_received(self, message: StoredMessage, unusable: Sequence[Outcome]) -> list[D]:
        """Hand over what can be acked now that a message has come, and what is ``unusable`` of it is recorded.

        A message without a slot that is used is not kept for its group's checkpoint: the stream has better use for
        the room.
        """
        if len(unusable) == len(message.slots):
            return self.inventory.release_message(message)
        return self.release([message.group_id])

    def release_cuts(self, step: int) -> list[D]:
        """Hand over, to be acked, what the checkpoint of ``step`` contains."""
        groups = [group.group_id for cut in self._cuts_through(step) for group in cut.groups]
        for cut in self._cuts_through(step):
            del self.unacked_cuts[cut.step]
        for group_id in groups:
            self._in_cuts.pop(group_id, None)
        return self.release(groups)

    # inside

    def _cuts_through(self, step: int) -> list[Cut]:
        return [cut for number, cut in sorted(self.unacked_cuts.items()) if number <= step]

    def _untrained(self, group_id: str, kind: OutcomeKind, *, reason: str, step: int) -> Outcome:
        group = self.inventory.open.get(group_id) or self._in_cuts.get(group_id)
        num_failed = group.num_failed_attempts if group else 0
        scored = group.scored if isinstance(group, OpenGroup) and kind in TAUGHT_NOTHING else []
        if kind is OutcomeKind.FAILED:
            num_failed += 1
            if num_failed >= self._max_attempts:
                kind = OutcomeKind.DEAD
        return Outcome(
            group_id=group_id,
            kind=kind,
            lineage=self.lineage,
            step=step,
            reason=reason,
            num_failed_attempts=num_failed,
            mean_reward=mean([item.slot.reward for item in scored]) if scored else None,
            num_whole_before=self._num_whole,
            workflow=group.workflow if group else "",
        )


def _has_failed(outcome: Outcome) -> bool:
    return outcome.kind in (OutcomeKind.FAILED, OutcomeKind.DEAD)
