"""P1: what was acknowledged is trained, settled or still stored; checkpoints and archived images are as written.

P2: in the surviving lineage, once. Pure.
"""

from collections import defaultdict
from collections.abc import Iterator

from areal_async.doctor.audit.reconciliation import OPEN, Reconciliation, SlotFate
from areal_async.doctor.audit.report import Ruling, Violation, rule
from areal_async.doctor.audit.report import ViolationKind as Kind
from areal_async.protocol.types import GroupId, OutcomeKind


def rule_durable(audit: Reconciliation, admitted: list[GroupId]) -> Ruling:
    """Judge P1.

    Args:
        admitted: every group whose ticket was published before the tickets were read.
    """
    lost = [(uid, fate.reason) for uid, fate in sorted(audit.fates.items()) if fate.kind == SlotFate.LOST]
    findings = [Kind.LOST.of(uid, reason) for uid, reason in lost]
    findings += _missing_siblings(audit, admitted)
    findings += [Kind.DAMAGED.of(one.version, one.reason) for one in audit.evidence.damaged_checkpoints]
    findings += [
        Kind.DAMAGED.of(slot.name, f"step {slot.step}: {fault}")
        for slot in audit.evidence.archive
        for fault in slot.image_faults
    ]
    num_received = len(audit.received)
    num_used = sum(uid not in audit.received for uid in audit.fates)
    sentence = f"{num_received} trajectories acknowledged to {len(audit.evidence.produced)} producers"
    if num_used:
        sentence += f", {num_used} more stored or used that no receipt notes"
    missing = list(_unknown_producers(audit)) if audit.fates else ["nothing was stored yet"]
    return rule("P1", "durable", sentence, findings=findings, missing=missing)


def _missing_siblings(audit: Reconciliation, admitted: list[GroupId]) -> list[Violation]:
    """A ticket is acked when every slot is stored: what an open group without a ticket lacks is lost.

    This asks for no receipt, so it also speaks of producers on other hosts. A group without a trace of any slot is
    left to P7: there is no telling whether its ticket was lost, or its trajectories.
    """
    seen: dict[str, set[int]] = defaultdict(set)
    for fate in audit.fates.values():
        if fate.kind not in (OutcomeKind.DUPLICATE, OutcomeKind.LATE):
            seen[fate.group_id].add(fate.sibling)
    text = "its ticket was acked, so it was stored; it is neither stored nor settled"
    return [
        Kind.LOST.of(f"{group_id}.{sibling}", text)
        for group_id in map(str, admitted)
        if audit.groups.get(group_id, OPEN) == OPEN and seen[group_id] and group_id not in audit.evidence.tickets
        for sibling in range(audit.evidence.rules.of(group_id).group_size)
        if sibling not in seen[group_id]
    ]


def _unknown_producers(audit: Reconciliation) -> Iterator[str]:
    """Yield what keeps the receipts from being the whole list."""
    evidence = audit.evidence
    acknowledged: dict[str, int] = defaultdict(int)
    for stamp in evidence.stamps:
        acknowledged[stamp.producer] = max(acknowledged[stamp.producer], stamp.num_acknowledged)
    yield from evidence.absent_streams
    if not evidence.produced:
        yield "receipts: no producer has left any, so only whole groups can be checked"
    for producer, count in sorted(acknowledged.items()):
        if producer not in evidence.produced:
            yield f"receipts of {producer}, which says that {count} of its messages were acknowledged"
            continue
        noted = {receipt.number for receipt in evidence.produced[producer].receipts}
        unnoted = [number for number in range(1, count + 1) if number not in noted]
        if unnoted:
            yield f"receipts of {producer} for {len(unnoted)} of its messages, the first number {unnoted[0]}"
    for producer, produced in evidence.produced.items():
        if produced.num_damaged:
            yield f"{produced.num_damaged} receipts of {producer}: their lines are damaged"


def rule_once(audit: Reconciliation) -> Ruling:
    """Judge P2: archive, ledger and journal name each slot once, and agree with one another."""
    findings = [*_doubles(audit), *_disagreements(audit)]
    sentence = (
        f"{len(audit.evidence.archive)} slots in {len(audit.steps)} archived steps, {len(audit.ledger)} steps in the "
        f"ledger, {len(audit.journal.cuts)} surviving cuts"
    )
    return rule("P2", "once", sentence, findings=findings, missing=audit.unarchived())


def _doubles(audit: Reconciliation) -> Iterator[Violation]:
    lists = {
        "archived as trained in": [(slot.name, slot.step) for slot in audit.evidence.archive],
        "cut for": [(group.group_id, step) for step, cut in audit.journal.cuts.items() for group in cut.groups],
        "in the ledger for": [(group_id, step) for step, groups in audit.ledger.items() for group_id in groups],
    }
    for what, named in lists.items():
        steps_of: dict[str, list[int]] = defaultdict(list)
        for name, step in named:
            steps_of[name].append(step)
        for name, steps in sorted(steps_of.items()):
            if len(steps) > 1:
                yield Kind.TWICE.of(name, f"{what} steps {', '.join(map(str, sorted(steps)))}")


def _disagreements(audit: Reconciliation) -> Iterator[Violation]:
    """Ledger and archive hold the same groups in each step, and none that the journal does not know of."""
    for step in sorted(audit.ledger.keys() | audit.steps.keys()):
        archived = {slot.group_id for slot in audit.steps.get(step, [])}
        in_step = set(audit.ledger.get(step, archived))
        cut = audit.journal.cuts.get(step)
        in_cut = {group.group_id for group in cut.groups} if cut else set()
        if step in audit.steps:
            for group_id in sorted(archived ^ in_step):
                place, other = ("archive", "ledger") if group_id in archived else ("ledger", "archive")
                yield Kind.DISAGREES.of(group_id, f"step {step}: in the {place} and not in the {other}")
        for group_id in sorted((archived | in_step) - in_cut):
            yield Kind.DISAGREES.of(group_id, f"step {step}: trained, and not in the journal's cut")
        if step <= audit.checkpoint_step:  # later ones may be given up by the next lineage, their archive moved away
            for group_id in sorted(archived | in_step):
                outcome = audit.journal.outcomes.get(group_id)
                if outcome is not None and outcome.kind is not OutcomeKind.TRAINED:
                    yield Kind.DISAGREES.of(group_id, f"step {step}: trained, and recorded {outcome.kind}")
    in_ledger = {group_id for groups in audit.ledger.values() for group_id in groups}
    for group_id, outcome in sorted(audit.journal.outcomes.items()):
        # Later ones are of a newer checkpoint, or given up by a lineage that will record it before it trains anew.
        if outcome.kind is OutcomeKind.TRAINED and outcome.step <= audit.checkpoint_step and group_id not in in_ledger:
            yield Kind.DISAGREES.of(group_id, f"step {outcome.step}: recorded trained, and not in the ledger")
    for line in audit.evidence.metrics:
        number, count = line.get("step"), line.get("num_trajectories")
        rows = audit.steps.get(number, []) if isinstance(number, int) else []
        if rows and count != len(rows):
            yield Kind.DISAGREES.of(f"step {number}", f"metrics say {count} trajectories, the archive has {len(rows)}")
