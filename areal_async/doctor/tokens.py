"""What was trained, looked at token by token: P3 fresh, P4 whole, P5 versioned. Pure."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from areal_async.algorithms.advantages import Sibling
from areal_async.algorithms.credit import reply_advantages
from areal_async.doctor.books import Books
from areal_async.doctor.evidence import ArchivedSlot
from areal_async.doctor.report import Finding, Kind, Ruling, rule
from areal_async.staleness import age_at
from areal_async.types import Version

TOLERANCE = 1e-5
"""Relative and absolute, between an archived advantage and the one computed from its siblings' rewards."""


def rule_fresh(books: Books) -> Ruling:
    """Judge P3: the age of every trained token, by the lineage rules, against the bound that its step was cut under."""
    findings: list[Finding] = []
    num_tokens = num_masked = oldest = 0
    for slot in books.evidence.archive:
        bound, masks_stale, branches = _bound(books, slot.step)
        for packed, count in slot.num_by_version.items():
            version = Version.unpack(packed)
            what = f"step {slot.step}: {count} tokens of version {version}"
            if version.lineage > slot.lineage:
                findings.append(Finding(Kind.OVER_AGE, slot.name, f"{what}, of a newer lineage than the step's"))
                continue
            age = age_at(step=slot.step, version=version, lineage=slot.lineage, branches=branches)
            if age < 0:
                findings.append(Finding(Kind.OVER_AGE, slot.name, f"{what}, which was made only later"))
            elif age <= bound:
                num_tokens += count
                oldest = max(oldest, age)
            elif masks_stale:
                num_masked += count
            else:
                findings.append(Finding(Kind.OVER_AGE, slot.name, f"{what} have age {age}, need at most {bound}"))
    for line in books.evidence.metrics:
        step = int(line.get("step", 0))
        bound, _, _ = _bound(books, step)
        if line.get("staleness_max", 0) > bound:
            text = f"metrics say that a token of age {line['staleness_max']} was trained, need at most {bound}"
            findings.append(Finding(Kind.OVER_AGE, f"step {step}", text))
    sentence = f"{num_tokens} trained tokens, the oldest of age {oldest}"
    if num_masked:
        sentence += f", {num_masked} older ones masked"
    return rule("P3", "fresh", sentence, findings=findings, missing=_unarchived(books))


def _bound(books: Books, step: int) -> tuple[int, bool, dict[int, int]]:
    cut = books.journal.cuts.get(step)
    branches = {int(lineage): shared for lineage, shared in (cut.branches if cut else books.journal.branches).items()}
    if cut is None:
        return books.evidence.rules.max_staleness, False, branches
    return cut.max_staleness, cut.masks_stale, branches


def rule_whole(books: Books) -> Ruling:
    """Judge P4: each group is trained with its own siblings alone, enough of them, and their own baseline."""
    findings: list[Finding] = []
    num_groups = 0
    for step, slots in books.steps.items():
        groups: dict[str, list[ArchivedSlot]] = defaultdict(list)
        for slot in slots:
            groups[slot.group_id].append(slot)
        num_groups += len(groups)
        findings += _group_faults(books, step, dict(sorted(groups.items())))
        findings += _reward_faults(books, step, slots)
    sentence = f"{num_groups} groups in {len(books.steps)} archived steps, advantages computed anew"
    return rule("P4", "whole", sentence, findings=findings, missing=_unarchived(books))


def _group_faults(books: Books, step: int, groups: Mapping[str, Sequence[ArchivedSlot]]) -> Iterator[Finding]:
    rules = books.evidence.rules
    outcomes = [
        [Sibling(reward=slot.reward, num_tokens=slot.num_sampled, credits=slot.credits) for slot in siblings]
        for siblings in groups.values()
    ]
    every = reply_advantages(outcomes, rules.advantages)
    for (group_id, siblings), expected in zip(groups.items(), every, strict=True):
        if len(siblings) < rules.of(group_id).min_group_size:
            need = rules.of(group_id).min_group_size
            text = f"step {step}: trained with {len(siblings)} siblings, need at least {need}"
            yield Finding(Kind.NOT_WHOLE, group_id, text)
        for slot, values in zip(siblings, expected, strict=True):
            for got, value in zip(slot.advantages, values, strict=True):
                if not math.isclose(got, value, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
                    text = f"step {step}: trained with advantage {got:.6g}, the rewards give {value:.6g}"
                    yield Finding(Kind.NOT_WHOLE, slot.name, text)


def _reward_faults(books: Books, step: int, slots: Sequence[ArchivedSlot]) -> Iterator[Finding]:
    """Hold the archive against the cut, which was journalled before the step ran."""
    in_cut = books.cut_slots(step)
    for slot in slots if in_cut else ():
        item = in_cut.get((slot.group_id, slot.sample_uid))
        if item is None:
            yield Finding(
                Kind.NOT_WHOLE,
                slot.name,
                f"step {step}: trained {slot.sample_uid}, which its cut does not name in this group",
            )
        elif tuple(item.slot.credits) != slot.credits:
            yield Finding(Kind.NOT_WHOLE, slot.name, f"step {step}: archived with other credits than it was cut with")
        elif item.slot.reward != slot.reward:
            text = f"step {step}: archived with reward {slot.reward:.6g}, cut with {item.slot.reward:.6g}"
            yield Finding(Kind.NOT_WHOLE, slot.name, text)


def rule_versioned(books: Books) -> Ruling:
    """Judge P5: every sampled token, trained or stored, carries a version, and no other token does."""
    evidence = books.evidence
    findings = [
        Finding(Kind.UNVERSIONED, slot.name, f"step {slot.step}: {fault}")
        for slot in evidence.archive
        for fault in slot.token_faults
    ]
    findings += [
        Finding(Kind.UNVERSIONED, slot.sample_uid, fault) for slot in evidence.stored for fault in slot.token_faults
    ]
    for step, slots in books.steps.items():
        in_cut = books.cut_slots(step)
        for slot in slots:
            item = in_cut.get((slot.group_id, slot.sample_uid))
            if item is not None and item.slot.num_output_tokens != slot.num_sampled:
                counts = f"{slot.num_sampled} tokens are archived as sampled, {item.slot.num_output_tokens} were"
                findings.append(Finding(Kind.UNVERSIONED, slot.name, f"step {step}: {counts}"))
    num_tokens = sum(slot.num_sampled for slot in evidence.archive)
    sentence = f"{num_tokens} sampled tokens in the archive, and those of {len(evidence.stored)} stored trajectories"
    return rule("P5", "versioned", sentence, findings=findings, missing=_unarchived(books))


def _unarchived(books: Books) -> list[str]:
    """A checkpoint waits for the archive; what was trained since may not be archived yet, or never."""
    trained = set(map(int, books.evidence.ledger.trained)) if books.evidence.ledger else set()
    missing = [f"the archive of step {step}" for step in sorted(trained - books.steps.keys())]
    missing += books.evidence.unreadable_files
    return missing if trained or books.steps else [*missing, "nothing is trained yet"]
