"""P7: with the default sampler each prompt has one admission per epoch, and none is given up in silence. Pure.

A curriculum passes prompts over. Which ones follows from the record and the log, and is worked out here again: that
none but those was left out can be proved under it too.
"""

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator

import msgspec

from areal_async.controller.admission import first_groups
from areal_async.controller.curriculum import MAX_LOOKED_AT, Curriculum, Visits
from areal_async.controller.sampler import RowPool
from areal_async.doctor.audit.reconciliation import OPEN, TRAINED, Reconciliation
from areal_async.doctor.audit.report import Ruling, Violation, rule
from areal_async.doctor.audit.report import ViolationKind as Kind
from areal_async.protocol.types import GroupId, OutcomeKind

FAILURES = (OutcomeKind.FAILED, OutcomeKind.DEAD)


def admitted_groups(audit: Reconciliation) -> list[GroupId]:
    """Return every group that the admission record counts: the sampler's first ones, and the re-admitted."""
    rules, admitted = audit.evidence.rules, audit.evidence.admitted
    again = [item.group_id for item in audit.accounts.readmissions[: admitted.num_readmitted]]
    if rules.num_rows:
        return [*first_groups(admitted, audit.evidence.sampler, _curriculum(audit)), *again]
    # Without the data's size: what left a trace; of a live run, before the tickets were read.
    known = {group_id for group_id, _ in audit.received.values()} if audit.evidence.is_live else audit.groups.keys()
    return sorted({group for group in map(GroupId.parse, known) if group.attempt == 0} | set(again))


def rule_covered(audit: Reconciliation, admitted: list[GroupId]) -> Ruling:
    """Judge P7."""
    evidence, record = audit.evidence, audit.evidence.admitted
    findings = [
        *_holes(audit, admitted),
        *_strangers(audit),
        *_repeats(audit),
        *_failures(audit),
    ]
    if len(audit.accounts.readmissions) < record.num_readmitted:
        text = f"the record counts {record.num_readmitted} re-admissions, the log {len(audit.accounts.readmissions)}"
        findings.append(Kind.DISAGREES.of("admitted", text))
    num_first = sum(group.attempt == 0 for group in admitted)
    if evidence.rules.num_rows and num_first != record.num_fresh - record.num_skipped:
        text = (
            f"the record counts {record.num_skipped} prompts passed over, the log gives {record.num_fresh - num_first}"
        )
        findings.append(Kind.DISAGREES.of("admitted", text))
    missing = [] if evidence.rules.num_rows else [f"the data: {evidence.rules.why_no_rows}"]
    missing += evidence.absent_streams
    if not record.total:
        missing.append("nothing is admitted yet")
    parts = [*_visits(audit, admitted), f"{record.num_readmitted} re-admissions"]
    if evidence.rules.curriculum is not None:
        parts.append(f"{record.num_skipped} visits passed over by the curriculum, so no epoch is promised to be whole")
    sentence = "; ".join(parts)
    return rule("P7", "covered", sentence, findings=findings, missing=missing)


def _curriculum(audit: Reconciliation) -> Curriculum | None:
    """Return what passed prompts over, with all that the log says of their visits."""
    rules, visits = audit.evidence.rules, Visits()
    if rules.curriculum is None:
        return None
    for entry in audit.evidence.log:
        visits.read(entry)
    return Curriculum(rules.curriculum, audit.evidence.sampler, visits, seed=rules.seed)


def _visits(audit: Reconciliation, admitted: list[GroupId]) -> Iterator[str]:
    """Say how many prompts each epoch has admitted; each task's epochs where they are its own."""
    rules = audit.evidence.rules
    pools = audit.evidence.sampler.pools if rules.tasks else ()
    for number, pool in enumerate(pools or [RowPool(0, sys.maxsize)]):
        epochs = Counter(group.epoch for group in admitted if group.attempt == 0 and pool.holds(group.index))
        visited = "; ".join(f"epoch {epoch}: {count} prompts" for epoch, count in sorted(epochs.items())) or "no prompt"
        task = f"task {number}: " if len(pools) > 1 else ""
        yield f"{task}{visited} of {pool.num_rows if pools else 'an unknown number'}"


def _holes(audit: Reconciliation, admitted: list[GroupId]) -> Iterator[Violation]:
    """A group that was admitted is settled, in a cut, stored in part, or has its ticket: else it is forgotten."""
    evidence = audit.evidence
    has_slots = {fate.group_id for fate in audit.fates.values()}
    for group in map(str, admitted):
        if audit.groups.get(group, OPEN) != OPEN:
            continue
        if group not in evidence.tickets and group not in has_slots:
            yield Kind.HOLE.of(group, "admitted, and there is neither its ticket, nor a trajectory, nor an outcome")
        elif evidence.is_finished:
            yield Kind.HOLE.of(group, "the run has finished, and its outcome is not recorded")


def _strangers(audit: Reconciliation) -> Iterator[Violation]:
    """No group but the sampler's next ones and those that an outcome re-admits."""
    rules, last = audit.evidence.rules, audit.evidence.admitted_last
    due = {item.group_id for item in audit.accounts.readmissions[:]}
    if rules.num_rows:
        # tickets are published before the record moves on
        far = MAX_LOOKED_AT if rules.curriculum else rules.max_groups_in_flight
        further = msgspec.structs.replace(last, num_fresh=last.num_fresh + far)
        due |= set(first_groups(further, audit.evidence.sampler, _curriculum(audit)))
    for group in sorted(map(GroupId.parse, audit.groups)):
        if group not in due and (group.attempt or rules.num_rows):
            again = "admitted again, though no outcome of the attempt before it asks for that"
            yield Kind.OUT_OF_TURN.of(str(group), again if group.attempt else "admitted, though its turn has not come")


def _repeats(audit: Reconciliation) -> Iterator[Violation]:
    """One attempt at the most is trained."""
    trained: dict[tuple[int, int], list[str]] = defaultdict(list)
    for group_id, fate in audit.groups.items():
        if fate == TRAINED:
            group = GroupId.parse(group_id)
            trained[group.epoch, group.index].append(group_id)
    for groups in trained.values():
        if len(groups) > 1:
            text = f"several attempts at one prompt were trained: {', '.join(sorted(groups))}"
            yield Kind.TWICE.of(min(groups), text)


def _failures(audit: Reconciliation) -> Iterator[Violation]:
    """Failed attempts are counted per prompt; the last one that is allowed is recorded dead, and has its letter."""
    limit = audit.evidence.rules.max_attempts
    letters = {letter.group_id: letter for letter in audit.evidence.dead_letters}
    failed: Counter[tuple[int, int]] = Counter()
    for name, outcome in audit.journal.outcomes.items():
        count = outcome.num_failed_attempts
        if outcome.kind in FAILURES:
            group = GroupId.parse(name)
            failed[group.epoch, group.index] += 1
        if outcome.kind is OutcomeKind.FAILED and count >= limit:
            text = f"failed {count} times and not recorded dead, need at most {limit} attempts"
            yield Kind.ATTEMPTS.of(name, text)
        if outcome.kind is OutcomeKind.DEAD:
            if count < limit:
                yield Kind.ATTEMPTS.of(name, f"recorded dead after {count} failed attempts, need {limit}")
            if name not in letters:
                yield Kind.NO_LETTER.of(name, "recorded dead, and not in the dead-letter stream")
            elif not letters[name].reason:
                yield Kind.NO_LETTER.of(name, "in the dead-letter stream without a reason")
    again = Counter((group.epoch, group.index) for group in audit.accounts.again_after_death)
    for prompt, count in sorted(failed.items()):
        allowed = limit * (1 + again[prompt])
        if count > allowed:
            epoch, index = prompt
            yield Kind.ATTEMPTS.of(f"{epoch}-{index}", f"{count} failed attempts, need at most {allowed}")
