"""What was trained, looked at token by token: P3 fresh, P4 whole, P5 versioned. Pure."""

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from operator import attrgetter

from areal_async.algorithms.advantages import AdvantageRule, Sibling
from areal_async.algorithms.credit import reply_advantages
from areal_async.doctor.audit.reconciliation import Reconciliation
from areal_async.doctor.audit.report import Ruling, Violation, rule
from areal_async.doctor.audit.report import ViolationKind as Kind
from areal_async.doctor.audit.run_record import ArchivedSlot
from areal_async.protocol.staleness import age_at
from areal_async.protocol.types import Version

TOLERANCE = 1e-5
"""Relative and absolute, between an archived advantage and the one computed from its siblings' rewards."""
SUM_TOLERANCE = 1e-4
"""Of a group's advantages, each a float32, relative to the largest of them."""
WHITE_TOLERANCE = 1e-2
"""Of the mean and variance of a step's advantages."""
GROUP_OF = attrgetter("group_id")


def rule_fresh(audit: Reconciliation) -> Ruling:
    """Judge P3: the age of every trained token, by the lineage rules, against the bound that its step was cut under."""
    findings: list[Violation] = []
    num_tokens = num_masked = oldest = 0
    for slot in audit.evidence.archive:
        bound, masks_stale, branches = _bound(audit, slot.step)
        for packed, count in slot.num_by_version.items():
            version = Version.unpack(packed)
            what = f"step {slot.step}: {count} tokens of version {version}"
            if version.lineage > slot.lineage:
                findings.append(Kind.OVER_AGE.of(slot.name, f"{what}, of a newer lineage than the step's"))
                continue
            age = age_at(step=slot.step, version=version, lineage=slot.lineage, branches=branches)
            if age < 0:
                findings.append(Kind.OVER_AGE.of(slot.name, f"{what}, which was made only later"))
            elif age <= bound:
                num_tokens += count
                oldest = max(oldest, age)
            elif masks_stale:
                num_masked += count
            else:
                findings.append(Kind.OVER_AGE.of(slot.name, f"{what} have age {age}, need at most {bound}"))
    for line in audit.evidence.metrics:
        step = int(line.get("step", 0))
        bound, _, _ = _bound(audit, step)
        if line.get("staleness_max", 0) > bound:
            text = f"metrics say that a token of age {line['staleness_max']} was trained, need at most {bound}"
            findings.append(Kind.OVER_AGE.of(f"step {step}", text))
    sentence = f"{num_tokens} trained tokens, the oldest of age {oldest}"
    if num_masked:
        sentence += f", {num_masked} older ones masked"
    return rule("P3", "fresh", sentence, findings=findings, missing=audit.unarchived())


def _bound(audit: Reconciliation, step: int) -> tuple[int, bool, dict[int, int]]:
    cut = audit.journal.cuts.get(step)
    branches = {int(lineage): shared for lineage, shared in (cut.branches if cut else audit.journal.branches).items()}
    if cut is None:
        return audit.evidence.rules.max_staleness, False, branches
    return cut.max_staleness, cut.masks_stale, branches


def rule_whole(audit: Reconciliation) -> Ruling:
    """Judge P4: each group is trained with its own siblings alone, enough of them, and their own baseline."""
    findings: list[Violation] = []
    num_groups = 0
    for step, slots in audit.steps.items():
        groups = {group: list(own) for group, own in groupby(sorted(slots, key=GROUP_OF), key=GROUP_OF)}
        num_groups += len(groups)
        findings += _group_faults(audit, step, groups)
        findings += _reward_faults(audit, step, slots)
    baseline = audit.evidence.rules.advantages
    how = f"made by {baseline.made_by}" if baseline.made_by else "computed anew"
    where = {"group": ", their sum 0 in each group", "step": ", whitened over each step", "": ""}[baseline.centred_in]
    sentence = f"{num_groups} groups in {len(audit.steps)} archived steps, advantages {how}{where}"
    missing = audit.unarchived()
    if baseline.is_unknown:
        missing.append(f"what advantages were compared with: they are made by {baseline.made_by}")
    return rule("P4", "whole", sentence, findings=findings, missing=missing)


def _group_faults(
    audit: Reconciliation, step: int, groups: Mapping[str, Sequence[ArchivedSlot]]
) -> Iterator[Violation]:
    rules = audit.evidence.rules
    for group_id, siblings in groups.items():
        if len(siblings) < (need := rules.of(group_id).min_group_size):
            text = f"step {step}: trained with {len(siblings)} siblings, need at least {need}"
            yield Kind.NOT_WHOLE.of(group_id, text)
    if not rules.advantages.made_by:
        yield from _advantage_faults(step, groups, rules.advantages.rule)
    elif rules.advantages.centred_in == "group":
        yield from _sum_faults(step, groups)
    elif rules.advantages.centred_in == "step":
        yield from _whiteness_faults(step, [slot for siblings in groups.values() for slot in siblings])


def _advantage_faults(
    step: int, groups: Mapping[str, Sequence[ArchivedSlot]], how: AdvantageRule
) -> Iterator[Violation]:
    """Compute the advantages anew, from the rewards of the siblings that were trained."""
    outcomes = [
        [Sibling(reward=slot.reward, num_tokens=slot.num_sampled, credits=slot.credits) for slot in siblings]
        for siblings in groups.values()
    ]
    for siblings, expected in zip(groups.values(), reply_advantages(outcomes, how), strict=True):
        for slot, values in zip(siblings, expected, strict=True):
            for got, value in zip(slot.advantages, values, strict=True):
                if not math.isclose(got, value, rel_tol=TOLERANCE, abs_tol=TOLERANCE):
                    text = f"step {step}: trained with advantage {got:.6g}, the rewards give {value:.6g}"
                    yield Kind.NOT_WHOLE.of(slot.name, text)


def _sum_faults(step: int, groups: Mapping[str, Sequence[ArchivedSlot]]) -> Iterator[Violation]:
    """Hold each group's advantages against a baseline of its own: whatever came off the rewards, they sum to 0."""
    for group_id, siblings in groups.items():
        total = sum(slot.advantage for slot in siblings)
        if not abs(total) <= SUM_TOLERANCE * max(1.0, *(abs(slot.advantage) for slot in siblings)):
            yield Kind.NOT_WHOLE.of(group_id, f"step {step}: advantages of its siblings add up to {total:.6g}, need 0")


def _whiteness_faults(step: int, slots: Sequence[ArchivedSlot]) -> Iterator[Violation]:
    """Hold the advantages of a step's tokens against mean 0 and variance 1; all of them 0 is as good."""
    parts = [slot.by_token for slot in slots if slot.by_token is not None]
    count = sum(number for _, _, number in parts)
    if not count:
        return
    mean = sum(total for total, _, _ in parts) / count
    variance = sum(squares for _, squares, _ in parts) / count - mean**2
    # A spread near 0 is divided by a little more than itself.
    if abs(mean) > WHITE_TOLERANCE or not (variance == 0 or 0.5 <= variance <= 1.0 + WHITE_TOLERANCE):
        text = f"tokens' advantages have mean {mean:.6g} and variance {variance:.6g}, need 0 and 1"
        yield Kind.NOT_WHOLE.of(f"step {step}", text)


def _reward_faults(audit: Reconciliation, step: int, slots: Sequence[ArchivedSlot]) -> Iterator[Violation]:
    """Hold the archive against the cut, which was journalled before the step ran."""
    in_cut = audit.cut_slots(step)
    for slot in slots if in_cut else ():
        item = in_cut.get((slot.group_id, slot.sample_uid))
        if item is None:
            text = f"step {step}: trained {slot.sample_uid}, which its cut does not name in this group"
            yield Kind.NOT_WHOLE.of(slot.name, text)
        elif tuple(item.slot.credits) != slot.credits:
            yield Kind.NOT_WHOLE.of(slot.name, f"step {step}: archived with other credits than it was cut with")
        elif item.slot.reward != slot.reward:
            text = f"step {step}: archived with reward {slot.reward:.6g}, cut with {item.slot.reward:.6g}"
            yield Kind.NOT_WHOLE.of(slot.name, text)


def rule_versioned(audit: Reconciliation) -> Ruling:
    """Judge P5: every sampled token, trained or stored, carries a version, and no other token does."""
    evidence = audit.evidence
    faults = [(slot.name, f"step {slot.step}: {fault}") for slot in evidence.archive for fault in slot.token_faults]
    faults += [(slot.sample_uid, fault) for slot in evidence.stored for fault in slot.token_faults]
    for step, slots in audit.steps.items():
        in_cut = audit.cut_slots(step)
        for slot in slots:
            item = in_cut.get((slot.group_id, slot.sample_uid))
            if item is not None and item.slot.num_output_tokens != slot.num_sampled:
                counts = f"{slot.num_sampled} tokens are archived as sampled, {item.slot.num_output_tokens} were"
                faults.append((slot.name, f"step {step}: {counts}"))
    findings = [Kind.UNVERSIONED.of(name, fault) for name, fault in faults]
    num_tokens = sum(slot.num_sampled for slot in evidence.archive)
    sentence = f"{num_tokens} sampled tokens in the archive, and those of {len(evidence.stored)} stored trajectories"
    return rule("P5", "versioned", sentence, findings=findings, missing=audit.unarchived())
