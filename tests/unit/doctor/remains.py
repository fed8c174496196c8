"""What a small run in good order has left: two steps of two groups of two, and a third group that waits."""

from typing import Any

from areal_async.algorithms.advantages import group_advantages
from areal_async.controller.sampler import Sampler
from areal_async.doctor.audit.run_record import (
    ArchivedSlot,
    Baseline,
    Rules,
    RunRecord,
    StoredSlot,
    TaskRules,
    TrainedGroups,
)
from areal_async.protocol.publish_log import Produced, Receipt, ReceivedSlot
from areal_async.protocol.types import (
    Admitted,
    Cut,
    CutGroup,
    CutKind,
    CutSlot,
    Outcome,
    OutcomeKind,
    Slot,
    SlotStatus,
    Version,
)

RULES = Rules(
    group_size=2, min_group_size=2, max_staleness=1, max_attempts=2, max_groups_in_flight=4, advantages=Baseline(),
    seed=1, tasks=(TaskRules(num_rows=100, group_size=2, min_group_size=2),),
)  # fmt: skip
GROUPS = [str(Sampler(100, seed=1).group_at(position)) for position in range(5)]
"""Two of each step, and the one that waits."""
STEPS = {1: GROUPS[0:2], 2: GROUPS[2:4]}
WAITING = GROUPS[4]


def uid(group_id: str, sibling: int) -> str:
    return f"{group_id}.{sibling}.n.ab"


def slot(group_id: str, sibling: int) -> Slot:
    return Slot(
        sibling=sibling, sample_uid=uid(group_id, sibling), status=SlotStatus.SCORED, reward=float(sibling),
        num_tokens=3, num_output_tokens=2, oldest="1-0", newest="1-0",
    )  # fmt: skip


def cut(step: int, group_ids: list[str]) -> Cut:
    groups = [
        CutGroup(group_id=one, workflow="w", slots=[CutSlot(slot=slot(one, sib), sequence=1) for sib in (0, 1)])
        for one in group_ids
    ]
    return Cut(lineage=1, step=step, groups=groups, max_staleness=1)


def archived(step: int, group_id: str, sibling: int, *, version: str = "1-0") -> ArchivedSlot:
    return ArchivedSlot(
        step=step, lineage=1, position=sibling, group_id=group_id, sibling=sibling, sample_uid=uid(group_id, sibling),
        reward=float(sibling), advantage=float(group_advantages([0.0, 1.0], std=True)[sibling]), num_sampled=2,
        num_by_version={Version.parse(version).pack(): 2},
    )  # fmt: skip


def receipt(number: int, group_id: str) -> Receipt:
    slots = [ReceivedSlot(sibling=sibling, sample_uid=uid(group_id, sibling), crc32=1) for sibling in (0, 1)]
    return Receipt(number=number, group_id=group_id, slots=slots)


def stored(group_id: str, sibling: int, *, damage: str = "", sample_uid: str = "") -> StoredSlot:
    return StoredSlot(
        group_id=group_id, sibling=sibling, sample_uid=sample_uid or uid(group_id, sibling), damage=damage
    )


def outcome(group_id: str, kind: OutcomeKind, **fields: Any) -> Outcome:
    return Outcome(group_id=group_id, kind=kind, lineage=1, **fields)


def whole_run() -> RunRecord:
    """A stopped run whose checkpoint holds both steps."""
    log: list[Cut | Outcome] = [Cut(kind=CutKind.BEGIN, lineage=1, step=0)]
    log += [cut(step, group_ids) for step, group_ids in STEPS.items()]
    log += [outcome(one, OutcomeKind.TRAINED, step=step) for step, groups in STEPS.items() for one in groups]
    admitted = Admitted(total=5, num_fresh=5)
    return RunRecord(
        rules=RULES,
        admitted=admitted,
        admitted_last=admitted,
        stored=[stored(WAITING, sibling) for sibling in (0, 1)],
        log=log,
        num_entries_before_messages=len(log),
        produced={"n.1": Produced([receipt(number, one) for number, one in enumerate(GROUPS, start=1)], 0)},
        archive=[archived(step, one, sib) for step, groups in STEPS.items() for one in groups for sib in (0, 1)],
        metrics=[{"step": step, "num_trajectories": 4, "staleness_max": 1} for step in STEPS],
        ledger=TrainedGroups(version="1-2", trained={str(step): list(groups) for step, groups in STEPS.items()}),
    )
