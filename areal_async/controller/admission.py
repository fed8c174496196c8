"""What the controller does next, as rules: which groups are admitted, and which are left over when the run ends.

Pure: everything follows from the books and the sampler. An ``Admission`` is carried out in its order, tickets
before the record; what a crash between the two repeats is de-duplicated by the tickets' ids.

Invariant: whatever has a ticket stands in the order of the record, within its next few positions. So another mix of
the tasks is on record before any ticket is chosen by it, and decides about no position that may have a ticket.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

import msgspec

from areal_async.config.settings import Settings
from areal_async.controller.accounts import RUN_ENDED, Accounts, Readmission
from areal_async.controller.curriculum import MAX_LOOKED_AT, Curriculum, PromptChoice, Visits, curriculum_of
from areal_async.controller.sampler import MixedSampler, Sampler, TaskShare, sampler_of, whole_weights
from areal_async.controller.tasks import Tasks
from areal_async.errors import UserError
from areal_async.protocol.types import Admitted, GroupId, Mix, Outcome, OutcomeKind, Version, WeightsVersion

ADMISSION_BATCH = 64
"""Tickets published together before the record moves on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixing:
    """How tasks are to take turns."""

    weights: list[int]
    """Weight of each task, in the order of the tasks, as in ``Mix``."""
    earliest: int
    """The first position of which nobody can have published a ticket when this controller began."""


def first_free(record: Admitted, *, has_curriculum: bool) -> int:
    """Return ``Mixing.earliest``, given the record as a controller takes it over: no other moves it from then on."""
    if not record.num_fresh and not record.mixes:
        return 0  # a mix is on record before any ticket
    return record.num_fresh + (MAX_LOOKED_AT if has_curriculum else ADMISSION_BATCH)


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    """Groups to be admitted together."""

    items: list[Readmission]
    """First those that are tried again, in the order of the log, then prompts that are new."""
    version: Version
    """Stands for the oldest of their tokens until a slot is stored."""
    first_number: int
    """Position of the first one among all admissions of the run."""
    record: Admitted
    """What ``admitted`` becomes when every ticket is stored."""


def missing_for_admission(accounts: Accounts, *, last_step: int) -> str:
    """Say what an admission waits for; nothing when one can be made now."""
    if accounts.journal.is_cut(last_step):
        return "the last step"
    if accounts.held is None:
        return "a server that holds an announced version"
    if accounts.num_credits == 0:
        return f"a credit: {accounts.num_in_flight} groups are admitted and not settled"
    return ""


def next_admission(
    accounts: Accounts,
    sampler: Sampler,
    *,
    last_step: int,
    curriculum: Curriculum | None = None,
    mixing: Mixing | None = None,
    batch: int = ADMISSION_BATCH,
) -> Admission | None:
    """Return what is to be admitted now, as far as credit reaches.

    Under a curriculum, or when the mix of the tasks changes, that may be nothing: then the record alone moves on.

    Args:
        batch: the most tickets that are published together. Credit alone is no bound: what an earlier controller
            published and did not record may be settled by now.
    """
    if accounts.held is None or missing_for_admission(accounts, last_step=last_step):
        return None
    count, admitted = min(accounts.num_credits, batch), accounts.admitted
    mixes = _mixes(admitted, sampler, mixing)
    if mixes != admitted.mixes:
        record = msgspec.structs.replace(admitted, mixes=mixes)
        return Admission(items=[], version=accounts.held, first_number=admitted.total + 1, record=record)
    again = accounts.due_readmissions[:count]
    choice = _choose(admitted, sampler, curriculum, count - len(again))
    fresh = [Readmission(group_id=group, num_failed_attempts=0) for group in choice.groups]
    return Admission(
        items=[*again, *fresh],
        version=accounts.held,
        first_number=admitted.total + 1,
        record=Admitted(
            total=admitted.total + len(again) + len(fresh),
            num_fresh=admitted.num_fresh + choice.num_looked_at,
            num_readmitted=admitted.num_readmitted + len(again),
            num_skipped=admitted.num_skipped + choice.num_looked_at - len(fresh),
            known=dict(choice.known),
            mixes=admitted.mixes,
        ),
    )


def _mixes(admitted: Admitted, sampler: Sampler, mixing: Mixing | None) -> list[Mix]:
    """Return the mixes that must be on record before anything is admitted."""
    if mixing is None or not isinstance(sampler, MixedSampler):
        return admitted.mixes
    if admitted.mixes and admitted.mixes[-1].weights == mixing.weights:
        return admitted.mixes
    now = admitted.num_fresh
    return sampler.remixed(admitted.mixes, mixing.weights, now=now, start=max(now, mixing.earliest))


def _choose(admitted: Admitted, sampler: Sampler, curriculum: Curriculum | None, count: int) -> PromptChoice:
    if curriculum is not None:
        return curriculum.choose(admitted, count)
    groups = [sampler.group_at(admitted.num_fresh + offset, admitted.mixes) for offset in range(count)]
    return PromptChoice(groups=groups, num_looked_at=count, known=admitted.known)


def has_ended(accounts: Accounts, newest: WeightsVersion | None, *, last_step: int) -> bool:
    """Say whether every unfenced server holds the run's last version, and not that of an end that it went on from."""
    if newest is None or not newest.final:
        return False
    version = Version.parse(newest.version)
    return version.step >= last_step and accounts.held == version


def first_groups(admitted: Admitted, sampler: Sampler, curriculum: Curriculum | None) -> Iterable[GroupId]:
    """Return every prompt that was admitted for the first time."""
    if curriculum is not None:
        return curriculum.first_groups(admitted.num_fresh, admitted.known, admitted.mixes)
    return sampler.first_groups(admitted.num_fresh, admitted.mixes)


def left_over(accounts: Accounts, sampler: Sampler, *, curriculum: Curriculum | None = None) -> list[Outcome]:
    """Return what is to be recorded of groups that were admitted and can never train now."""
    admitted, journal = accounts.admitted, accounts.journal
    again = (item.group_id for item in accounts.readmissions[: admitted.num_readmitted])
    in_cuts = journal.open_groups()
    return [
        Outcome(group_id=name, kind=OutcomeKind.ABANDONED, lineage=journal.lineage, reason=RUN_ENDED)
        for name in map(str, chain(first_groups(admitted, sampler, curriculum), again))
        if name not in journal.settled and name not in in_cuts
    ]


class AdmissionOrder:
    """The order in which a run's prompts have their turn, from when a controller begins."""

    def __init__(self, settings: Settings, tasks: Tasks, visits: Visits, *, record: Admitted) -> None:
        """``record``: as the controller takes it over."""
        self._tasks = tasks
        self.sampler = sampler_of(self._shares(settings), seed=settings.run.seed, admitted=record)
        self.curriculum = curriculum_of(settings, self.sampler, visits)
        self._first_free = first_free(record, has_curriculum=self.curriculum is not None)

    def may_be_admitted(self, group: GroupId, record: Admitted) -> bool:
        """Say whether a prompt may have had a ticket: none has to which the order comes after the next admission."""
        slack = ADMISSION_BATCH if self.curriculum is None else MAX_LOOKED_AT
        return group.index < self.sampler.num_rows and self.sampler.is_among_first(
            group, record.num_fresh + slack, record.mixes
        )

    def mixing(self, settings: Settings) -> Mixing:
        """Return how tasks are to take turns by these settings."""
        return Mixing(weights=whole_weights(self._shares(settings)), earliest=self._first_free)

    def shares(self, admitted: Admitted) -> dict[str, float]:
        """Return which part of the prompts each task has where the record is; empty where nobody decides about that."""
        if not isinstance(self.sampler, MixedSampler):
            return {}
        return dict(zip(self._tasks.names, self.sampler.shares_at(admitted.num_fresh, admitted.mixes), strict=True))

    def check_change(self, setting: str) -> None:
        """Refuse what the settings allow and this very run does not: a mix of tasks that have one order in common.

        Raises:
            UserError: it is one.
        """
        if setting.endswith(".ratio") and not isinstance(self.sampler, MixedSampler):
            raise UserError(
                f"{setting}: cannot change in this run: it was started before each task had epochs of its own, and the "
                "rows of all have one order in common; start another one"
            )

    def _shares(self, settings: Settings) -> list[TaskShare]:
        ratios = {task.name: task.ratio for task in settings.tasks}
        rows = zip(self._tasks.names, self._tasks.num_rows, strict=True)
        return [TaskShare(count, ratios.get(name, 1.0)) for name, count in rows]
