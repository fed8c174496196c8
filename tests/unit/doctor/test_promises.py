"""The doctor proves what holds, names exactly what does not, and says when it cannot tell."""

from dataclasses import replace

import msgspec
import pytest

from areal_async.config.settings import CurriculumSettings, Settings
from areal_async.controller.accounts import RUN_ENDED
from areal_async.controller.curriculum import Curriculum, Visits
from areal_async.doctor.audit.examination import baseline_of, diagnose
from areal_async.doctor.audit.report import PromiseVerdict, Ruling, ViolationKind
from areal_async.doctor.audit.run_record import Baseline, RunRecord, TaskRules, TrainedGroups
from areal_async.protocol.publish_log import ProducerSequence
from areal_async.protocol.types import Admitted, Cut, CutKind, GroupId, Mix, Outcome, OutcomeKind, Version
from areal_async.trainer.engine.digests import Damage
from tests.unit.doctor.remains import (
    GROUPS,
    STEPS,
    WAITING,
    archived,
    cut,
    outcome,
    stored,
    uid,
    whole_run,
)


def ruling(evidence: RunRecord, promise: str) -> Ruling:
    return next(one for one in diagnose("r", evidence).rulings if one.promise == promise)


def replace_lineage(entry: Cut, lineage: int) -> Cut:
    return msgspec.structs.replace(entry, lineage=lineage)


def refuted_ids(evidence: RunRecord, promise: str, kind: ViolationKind) -> list[str]:
    """The ids that refute a promise in one way."""
    judged = ruling(evidence, promise)
    assert judged.verdict is PromiseVerdict.REFUTED
    return [one.id for one in judged.findings if one.kind is kind]


def test_a_run_in_good_order_is_proved_in_every_promise() -> None:
    diagnosis = diagnose("r", whole_run())

    assert {one.promise: one.verdict for one in diagnosis.rulings} == dict.fromkeys(
        ("P1", "P2", "P3", "P4", "P5", "P7"), PromiseVerdict.PROVED
    )
    assert diagnosis.is_clean
    assert diagnosis.groups["trained"] == 4
    assert diagnosis.slots["still stored"] == 2


def test_nothing_is_decided_of_a_run_that_has_left_nothing() -> None:
    evidence = RunRecord(rules=whole_run().rules)

    assert {one.verdict for one in diagnose("r", evidence).rulings} == {PromiseVerdict.UNDECIDED}


# P1


def test_an_acknowledged_trajectory_that_is_neither_stored_nor_settled_is_lost() -> None:
    evidence = whole_run()
    evidence.stored = [stored(WAITING, 0)]

    assert refuted_ids(evidence, "P1", ViolationKind.LOST) == [uid(WAITING, 1)]


def test_a_checkpoint_that_is_not_what_was_written_is_found() -> None:
    evidence = whole_run()
    evidence.damaged_checkpoints = [Damage("1-2", "state/__0_0.distcp is missing")]

    assert refuted_ids(evidence, "P1", ViolationKind.DAMAGED) == ["1-2"]


def test_a_damaged_image_of_a_trained_step_is_told_of() -> None:
    evidence = whole_run()
    evidence.archive[0] = replace(evidence.archive[0], image_faults=("image ab: it cannot be read in images/",))

    assert refuted_ids(evidence, "P1", ViolationKind.DAMAGED) == [evidence.archive[0].name]


def test_a_stored_trajectory_with_a_damaged_payload_is_lost() -> None:
    evidence = whole_run()
    evidence.stored[0] = stored(WAITING, 0, damage="checksum")

    assert refuted_ids(evidence, "P1", ViolationKind.LOST) == [uid(WAITING, 0)]


def test_what_was_settled_may_be_gone_or_damaged() -> None:
    evidence = whole_run()
    evidence.stored = [stored(WAITING, 0, damage="checksum")]
    evidence.log.append(outcome(WAITING, OutcomeKind.STALE))

    assert ruling(evidence, "P1").verdict is PromiseVerdict.PROVED


def test_the_end_of_the_run_is_no_excuse_for_a_trajectory_that_is_gone() -> None:
    evidence = whole_run()
    evidence.log.append(outcome(WAITING, OutcomeKind.ABANDONED, reason=RUN_ENDED))
    assert ruling(evidence, "P1").verdict is PromiseVerdict.PROVED

    evidence.stored = [stored(WAITING, 1)]

    assert refuted_ids(evidence, "P1", ViolationKind.LOST) == [uid(WAITING, 0)]
    evidence.log.append(Cut(kind=CutKind.BEGIN, lineage=2, step=2))
    assert ruling(evidence, "P1").verdict is PromiseVerdict.PROVED, (
        "the run went on from its end, and removed what that left"
    )


def test_what_is_cut_and_in_no_checkpoint_must_still_be_stored() -> None:
    evidence = whole_run()
    evidence.log.append(cut(3, [WAITING]))
    evidence.num_entries_before_messages = len(evidence.log)
    assert ruling(evidence, "P1").verdict is PromiseVerdict.PROVED

    evidence.stored = []

    assert refuted_ids(evidence, "P1", ViolationKind.LOST) == [uid(WAITING, 0), uid(WAITING, 1)]


def test_a_slot_that_its_step_trained_without_is_lost() -> None:
    evidence = whole_run()
    evidence.archive = [one for one in evidence.archive if one.sample_uid != uid(GROUPS[0], 1)]

    assert refuted_ids(evidence, "P1", ViolationKind.LOST) == [uid(GROUPS[0], 1)]


def test_a_cut_alone_is_a_witness_that_a_slot_was_stored() -> None:
    evidence = whole_run()
    evidence.produced, evidence.stored = {}, []
    evidence.log.append(cut(3, [WAITING]))
    assert ruling(evidence, "P1").verdict is PromiseVerdict.UNDECIDED, (
        "it may have been stored after the stream was read"
    )

    evidence.num_entries_before_messages = len(evidence.log)

    assert refuted_ids(evidence, "P1", ViolationKind.LOST) == [uid(WAITING, 0), uid(WAITING, 1)]


def test_an_archive_that_is_still_being_written_is_no_witness_of_a_loss() -> None:
    evidence = whole_run()
    evidence.ledger = TrainedGroups(version="1-1", trained={"1": STEPS[1]})
    evidence.archive = [one for one in evidence.archive if one.name != f"{GROUPS[2]}.1"]

    assert ruling(evidence, "P1").verdict is PromiseVerdict.PROVED


def test_a_duplicate_that_is_gone_is_accounted_for_by_its_own_outcome() -> None:
    evidence = whole_run()
    evidence.log.append(outcome(WAITING, OutcomeKind.DUPLICATE, sample_uid=uid(WAITING, 1)))
    evidence.stored[1] = stored(WAITING, 1, sample_uid="winner")
    assert ruling(evidence, "P1").verdict is PromiseVerdict.PROVED

    evidence.stored = evidence.stored[:1]

    assert refuted_ids(evidence, "P1", ViolationKind.LOST) == [f"{WAITING}.1"]


def test_without_receipts_an_acked_ticket_proves_that_a_sibling_is_lost() -> None:
    evidence = whole_run()
    evidence.produced = {}
    evidence.stored = [stored(WAITING, 1)]

    assert refuted_ids(evidence, "P1", ViolationKind.LOST) == [f"{WAITING}.0"]


def test_a_sibling_is_not_missed_while_its_ticket_is_out() -> None:
    evidence = whole_run()
    evidence.tickets = {WAITING}
    evidence.produced["n.1"].receipts.pop()
    evidence.stored = [stored(WAITING, 1)]

    assert ruling(evidence, "P1").verdict is PromiseVerdict.PROVED


def test_a_sibling_of_a_group_that_a_live_run_admitted_during_the_look_is_not_missed() -> None:
    evidence = whole_run()
    evidence.rules = replace(evidence.rules, tasks=())
    evidence.is_live = True
    evidence.produced["n.1"].receipts.pop()
    evidence.stored = [stored(WAITING, 1)]

    assert ruling(evidence, "P1").verdict is PromiseVerdict.PROVED


@pytest.mark.parametrize("producer", ["n.1", "elsewhere.2"])
def test_a_producer_that_claims_more_than_its_receipts_leaves_the_proof_open(producer: str) -> None:
    evidence = whole_run()
    evidence.stamps = [ProducerSequence(producer=producer, number=9, num_acknowledged=8)]

    judged = ruling(evidence, "P1")

    assert judged.verdict is PromiseVerdict.UNDECIDED
    assert producer in judged.missing[0]


# P2


def test_a_slot_in_the_archive_of_two_steps_is_twice() -> None:
    evidence = whole_run()
    evidence.archive.append(archived(2, GROUPS[0], 1))

    assert refuted_ids(evidence, "P2", ViolationKind.TWICE) == [f"{GROUPS[0]}.1"]


def test_a_group_that_two_surviving_cuts_name_is_twice() -> None:
    evidence = whole_run()
    evidence.log.append(cut(3, [GROUPS[0]]))

    assert refuted_ids(evidence, "P2", ViolationKind.TWICE) == [GROUPS[0]]


def test_a_group_whose_cut_was_given_up_and_that_is_cut_anew_is_not_twice() -> None:
    evidence = whole_run()
    evidence.log += [
        cut(3, [WAITING]),
        Cut(kind=CutKind.BEGIN, lineage=2, step=2),
        Cut(kind=CutKind.BRANCH, lineage=2, step=2),
        replace_lineage(cut(4, [WAITING]), 2),
    ]

    assert ruling(evidence, "P2").verdict is PromiseVerdict.PROVED


def gone_back(*, is_recorded: bool) -> RunRecord:
    """The run that goes back to step 1, by a lineage that was killed before it moved anything away."""
    evidence = whole_run()
    evidence.metrics = [{**line, "weights_version": f"1-{line['step']}"} for line in evidence.metrics]
    evidence.ledger = TrainedGroups(version="2-1", trained={"1": list(STEPS[1])})
    evidence.log += [
        Cut(kind=CutKind.BEGIN, lineage=2, step=1),
        Cut(kind=CutKind.BRANCH, lineage=2, step=1, branches={"2": 1}),
    ]
    if is_recorded:
        evidence.log += [Outcome(group_id=one, kind=OutcomeKind.ROLLED_BACK, lineage=2) for one in STEPS[2]]
        evidence.tickets = {str(GroupId.parse(one).next_attempt) for one in STEPS[2]}
        evidence.admitted = evidence.admitted_last = Admitted(total=7, num_fresh=5, num_readmitted=2)
    return evidence


@pytest.mark.parametrize("is_recorded", [False, True])
def test_a_run_that_went_back_is_judged_by_what_survives(is_recorded: bool) -> None:
    diagnosis = diagnose("r", gone_back(is_recorded=is_recorded))

    assert diagnosis.is_clean
    assert [one.verdict for one in diagnosis.rulings] == [PromiseVerdict.PROVED] * len(diagnosis.rulings)
    assert diagnosis.groups.get("rolled_back", 0) == 2 * is_recorded


def test_a_checkpoint_that_the_run_went_back_behind_during_the_look_says_nothing_of_later_steps() -> None:
    evidence = gone_back(is_recorded=True)
    evidence.ledger = whole_run().ledger

    assert diagnose("r", evidence).is_clean


def test_a_group_that_stays_recorded_trained_in_steps_that_were_given_up_is_named() -> None:
    evidence = gone_back(is_recorded=True)
    evidence.log = [one for one in evidence.log if not isinstance(one, Outcome) or one.kind is OutcomeKind.TRAINED]
    evidence.log.append(msgspec.structs.replace(cut(2, [WAITING]), lineage=2, branches={"2": 1}))
    evidence.ledger = TrainedGroups(version="2-2", trained={"1": list(STEPS[1]), "2": [WAITING]})

    assert sorted(refuted_ids(evidence, "P2", ViolationKind.DISAGREES)) == sorted(STEPS[2])


@pytest.mark.parametrize("source", ["ledger", "archive", "journal"])
def test_records_of_a_step_that_disagree_are_named(source: str) -> None:
    evidence = whole_run()
    group_id = GROUPS[0]
    if source == "ledger":
        assert evidence.ledger
        evidence.ledger.trained["1"].remove(group_id)
    elif source == "archive":
        evidence.archive = [one for one in evidence.archive if one.group_id != group_id]
    else:
        evidence.log[1] = cut(1, STEPS[1][1:])

    assert refuted_ids(evidence, "P2", ViolationKind.DISAGREES)[0] == group_id


def test_a_group_that_was_trained_and_is_recorded_otherwise_is_named() -> None:
    evidence = whole_run()
    evidence.log = [
        outcome(GROUPS[0], OutcomeKind.STALE) if isinstance(one, Outcome) and one.group_id == GROUPS[0] else one
        for one in evidence.log
    ]

    assert refuted_ids(evidence, "P2", ViolationKind.DISAGREES) == [GROUPS[0]]


def test_a_group_that_fell_out_of_its_cut_is_no_contradiction() -> None:
    evidence = whole_run()
    evidence.log += [cut(3, [WAITING]), outcome(WAITING, OutcomeKind.STALE)]

    assert diagnose("r", evidence).is_clean


def test_a_step_without_an_archive_leaves_open_what_only_the_archive_tells() -> None:
    evidence = whole_run()
    evidence.archive = [one for one in evidence.archive if one.step != 1]

    for promise in ("P2", "P3", "P4", "P5"):
        judged = ruling(evidence, promise)
        assert judged.verdict is PromiseVerdict.UNDECIDED
        assert judged.missing == ["the archive of step 1"]


# P3


def test_a_token_over_the_bound_of_its_cut_is_named() -> None:
    evidence = whole_run()
    evidence.log.append(cut(3, [WAITING]))
    evidence.archive.append(archived(3, WAITING, 0, version="1-0"))

    assert refuted_ids(evidence, "P3", ViolationKind.OVER_AGE) == [f"{WAITING}.0"]


@pytest.mark.parametrize("version", ["1-2", "2-0"])
def test_a_token_of_a_version_that_came_later_is_named(version: str) -> None:
    evidence = whole_run()
    evidence.archive[-1] = replace(evidence.archive[-1], num_by_version={Version.parse(version).pack(): 2})

    assert refuted_ids(evidence, "P3", ViolationKind.OVER_AGE) == [evidence.archive[-1].name]


def test_age_counts_both_sides_of_a_branch() -> None:
    evidence = whole_run()
    evidence.log.append(Cut(lineage=2, step=2, max_staleness=1, branches={"2": 0}))
    carried = {Version(1, 1).pack(): 2}
    evidence.archive = [replace(one, lineage=2, num_by_version=carried) for one in evidence.archive[4:]]

    assert len(refuted_ids(evidence, "P3", ViolationKind.OVER_AGE)) == 4


def test_a_step_whose_metrics_admit_an_over_age_token_is_named() -> None:
    evidence = whole_run()
    evidence.metrics[1]["staleness_max"] = 2

    assert refuted_ids(evidence, "P3", ViolationKind.OVER_AGE) == ["step 2"]


# P4 and P5


def test_a_baseline_that_is_not_the_groups_own_is_named() -> None:
    evidence = whole_run()
    evidence.archive[0] = replace(evidence.archive[0], advantage=0.25)

    assert refuted_ids(evidence, "P4", ViolationKind.NOT_WHOLE) == [evidence.archive[0].name]


def told(baseline: Baseline, *advantages: float, by_token: tuple[float, float, int] | None = None) -> RunRecord:
    """The same run under another rule: what its siblings were trained with, in every group."""
    evidence = whole_run()
    evidence.rules = replace(evidence.rules, advantages=baseline)
    evidence.archive = [
        replace(slot, advantage=advantages[slot.sibling], by_token=by_token) for slot in evidence.archive
    ]
    return evidence


def test_advantages_of_a_critic_are_held_against_a_whitened_step_and_not_against_rewards() -> None:
    critic = Baseline(made_by="a critic", centred_in="step")
    white, shifted = told(critic, 3.0, 3.0, by_token=(0.0, 2.0, 2)), told(critic, 3.0, 3.0, by_token=(2.0, 4.0, 2))

    assert ruling(white, "P4").verdict is PromiseVerdict.PROVED
    assert ruling(white, "P4").sentence.endswith("advantages made by a critic, whitened over each step")
    assert refuted_ids(shifted, "P4", ViolationKind.NOT_WHOLE) == ["step 1", "step 2"]
    assert refuted_ids(told(critic, 3.0, 3.0, by_token=(0.0, 9.0, 2)), "P4", ViolationKind.NOT_WHOLE) == [
        "step 1",
        "step 2",
    ]
    assert ruling(told(critic, 0.0, 0.0, by_token=(0.0, 0.0, 2)), "P4").verdict is PromiseVerdict.PROVED


def test_whatever_came_off_the_rewards_a_groups_advantages_add_up_to_nothing() -> None:
    penalised = Baseline(made_by="rewards less their distance to a reference", centred_in="group")

    assert ruling(told(penalised, -0.3, 0.3), "P4").verdict is PromiseVerdict.PROVED
    assert refuted_ids(told(penalised, -0.3, 0.4), "P4", ViolationKind.NOT_WHOLE) == [
        *sorted(GROUPS[0:2]),
        *sorted(GROUPS[2:4]),
    ]


def test_what_a_users_own_call_makes_of_a_group_is_not_decidable() -> None:
    evidence = told(Baseline(made_by="mine.py:advantages", is_unknown=True), 5.0, 5.0)

    assert ruling(evidence, "P4").verdict is PromiseVerdict.UNDECIDED
    assert "mine.py:advantages" in ruling(evidence, "P4").missing[0]


@pytest.mark.parametrize(
    ("algorithm", "made_by", "centred_in"),
    [
        ({"name": "rloo"}, "", ""),
        ({"name": "ppo"}, "a critic", "step"),
        ({"name": "ppo", "advantage_std": "none"}, "a critic", ""),
        ({"name": "rloo", "kl_coef": 0.1, "kl_in": "reward"}, "rewards less", "group"),
        ({"name": "reinforce_pp", "kl_coef": 0.1, "kl_in": "reward"}, "rewards less", "step"),
        ({"name": "reinforce_pp_baseline", "kl_coef": 0.1, "kl_in": "reward"}, "rewards less", ""),
        ({"name": "ppo", "calls": ["mine.py:values"]}, "mine.py:values", ""),
    ],
)
def test_what_makes_the_advantages_is_known_from_the_settings(
    algorithm: dict[str, object], made_by: str, centred_in: str
) -> None:
    baseline = baseline_of(Settings.model_validate({"algorithm": algorithm}))

    assert baseline.made_by.startswith(made_by)
    assert bool(baseline.made_by) == bool(made_by)
    assert (baseline.centred_in, baseline.is_unknown) == (centred_in, "calls" in algorithm)


def test_a_group_below_the_minimum_is_named() -> None:
    evidence = whole_run()
    evidence.archive = [replace(evidence.archive[0], advantage=0.0), *evidence.archive[2:]]

    assert refuted_ids(evidence, "P4", ViolationKind.NOT_WHOLE) == [GROUPS[0]]


def test_a_neighbours_trajectory_in_a_group_is_named() -> None:
    evidence = whole_run()
    evidence.archive[0] = replace(evidence.archive[0], sample_uid=uid(GROUPS[1], 0))

    assert refuted_ids(evidence, "P4", ViolationKind.NOT_WHOLE) == [f"{GROUPS[0]}.0"]


def test_tokens_without_a_version_are_named_in_the_archive_and_in_the_stream() -> None:
    evidence = whole_run()
    evidence.archive[0] = replace(evidence.archive[0], token_faults=("1 sampled tokens without a version",))
    evidence.stored[0] = replace(evidence.stored[0], token_faults=("1 sampled tokens without a version",))
    evidence.archive[1] = replace(evidence.archive[1], num_sampled=1)

    assert refuted_ids(evidence, "P5", ViolationKind.UNVERSIONED) == [
        evidence.archive[0].name,
        uid(WAITING, 0),
        evidence.archive[1].name,
    ]


# P7


def forgotten() -> RunRecord:
    evidence = whole_run()
    evidence.stored = []
    evidence.produced["n.1"].receipts.pop()
    return evidence


def test_an_admitted_prompt_without_a_trace_is_a_hole() -> None:
    assert refuted_ids(forgotten(), "P7", ViolationKind.HOLE) == [WAITING]


def test_an_admitted_prompt_whose_ticket_waits_is_no_hole() -> None:
    evidence = forgotten()
    evidence.tickets = {WAITING}

    assert ruling(evidence, "P7").verdict is PromiseVerdict.PROVED


def test_a_finished_run_has_settled_all_that_it_admitted() -> None:
    evidence = whole_run()
    evidence.is_finished = True

    assert refuted_ids(evidence, "P7", ViolationKind.HOLE) == [WAITING]


def test_a_readmitted_prompt_without_a_trace_is_a_hole() -> None:
    evidence = whole_run()
    evidence.log.append(outcome(WAITING, OutcomeKind.FAILED, num_failed_attempts=1))
    assert ruling(evidence, "P7").verdict is PromiseVerdict.PROVED, "not admitted again yet"

    evidence.admitted = evidence.admitted_last = Admitted(total=6, num_fresh=5, num_readmitted=1)

    again = WAITING.removesuffix("-0") + "-1"
    assert refuted_ids(evidence, "P7", ViolationKind.HOLE) == [again]


def test_an_attempt_that_no_outcome_asked_for_is_out_of_turn() -> None:
    evidence = whole_run()
    again = WAITING.removesuffix("-0") + "-1"
    evidence.tickets = {again}

    assert refuted_ids(evidence, "P7", ViolationKind.OUT_OF_TURN) == [again]


def test_a_prompt_before_its_turn_is_named() -> None:
    evidence = whole_run()
    evidence.tickets = {"7-1-0"}

    assert refuted_ids(evidence, "P7", ViolationKind.OUT_OF_TURN) == ["7-1-0"]


def test_a_dead_prompt_needs_its_letter_and_its_reason() -> None:
    evidence = whole_run()
    dead = outcome(WAITING, OutcomeKind.DEAD, num_failed_attempts=2, reason="why")
    evidence.log.append(dead)
    assert refuted_ids(evidence, "P7", ViolationKind.NO_LETTER) == [WAITING]

    evidence.dead_letters = [dead]

    assert ruling(evidence, "P7").verdict is PromiseVerdict.PROVED


def test_more_failed_attempts_than_allowed_are_named() -> None:
    evidence = whole_run()
    evidence.log.append(outcome(WAITING, OutcomeKind.FAILED, num_failed_attempts=2))

    assert refuted_ids(evidence, "P7", ViolationKind.ATTEMPTS) == [WAITING]


def mixed_run() -> RunRecord:
    """Two tasks, one visited three times as often for each row, and five groups that wait for a node."""
    evidence = RunRecord(
        rules=replace(
            whole_run().rules,
            tasks=(
                TaskRules(num_rows=4, ratio=3.0, group_size=2, min_group_size=2),
                TaskRules(num_rows=4, group_size=3, min_group_size=1),
            ),
        )
    )
    evidence.admitted = evidence.admitted_last = Admitted(total=8, num_fresh=8)
    evidence.tickets = {str(evidence.sampler.group_at(position)) for position in range(8)}
    return evidence


def test_each_task_of_a_mix_is_covered_in_epochs_of_its_own() -> None:
    judged = ruling(mixed_run(), "P7")

    assert judged.verdict is PromiseVerdict.PROVED
    assert judged.sentence == (
        "task 0: epoch 0: 4 prompts; epoch 1: 2 prompts of 4; task 1: epoch 0: 2 prompts of 4; 0 re-admissions"
    )


def remixed_run() -> RunRecord:
    """The same after the second task was switched off, and on again, from the sixth and the tenth position on."""
    evidence = mixed_run()
    mixes = [
        Mix(start=5, weights=[1, 0], counts=[4, 1]),
        Mix(start=9, weights=[1, 1], counts=[8, 1]),
    ]
    evidence.admitted = evidence.admitted_last = Admitted(total=11, num_fresh=11, mixes=mixes)
    evidence.tickets = set(map(str, evidence.sampler.first_groups(11, mixes)))
    return evidence


def test_each_task_is_covered_whatever_mixes_there_were() -> None:
    judged = ruling(remixed_run(), "P7")

    assert judged.verdict is PromiseVerdict.PROVED
    assert judged.sentence == (
        "task 0: epoch 0: 4 prompts; epoch 1: 4 prompts; epoch 2: 1 prompts of 4; task 1: epoch 0: 2 prompts of 4; "
        "0 re-admissions"
    )


def test_a_prompt_that_an_earlier_mix_admitted_and_nobody_knows_of_is_a_hole() -> None:
    evidence = remixed_run()
    forgotten = next(str(group) for group in evidence.sampler.first_groups(5, evidence.admitted.mixes))
    evidence.tickets -= {forgotten}

    assert refuted_ids(evidence, "P7", ViolationKind.HOLE) == [forgotten]


def test_a_prompt_of_a_mix_before_its_turn_is_named() -> None:
    evidence = mixed_run()
    evidence.tickets |= {"1-7-0"}

    assert refuted_ids(evidence, "P7", ViolationKind.OUT_OF_TURN) == ["1-7-0"]


def test_a_task_decides_which_siblings_its_groups_have() -> None:
    evidence = mixed_run()
    groups = {task: next(name for name in evidence.tickets if int(name.split("-")[1]) // 4 == task) for task in (0, 1)}
    evidence.tickets -= set(groups.values())
    evidence.stored = [stored(groups[0], 0), stored(groups[0], 1), stored(groups[1], 0), stored(groups[1], 1)]

    assert refuted_ids(evidence, "P1", ViolationKind.LOST) == [f"{groups[1]}.2"]


def under_a_curriculum() -> RunRecord:
    """An epoch of 100 in which all was solved, and the next one, all of it settled."""
    evidence = RunRecord(rules=replace(whole_run().rules, curriculum=CurriculumSettings(name="pass_rate")))
    first = [str(evidence.sampler.group_at(position)) for position in range(100)]
    evidence.log = [outcome(one, OutcomeKind.FILTERED, mean_reward=1.0) for one in first]
    visits, known = Visits(), {"0-1": 100}
    for entry in evidence.log:
        visits.read(entry)
    curriculum = Curriculum(CurriculumSettings(name="pass_rate"), evidence.sampler, visits, seed=1)
    admitted = [str(group) for group in curriculum.first_groups(200, known)]
    evidence.tickets = set(admitted[100:])
    evidence.admitted = evidence.admitted_last = Admitted(
        total=len(admitted), num_fresh=200, num_skipped=200 - len(admitted), known=known
    )
    return evidence


def test_a_curriculum_passes_over_what_it_must_and_nothing_else() -> None:
    evidence = under_a_curriculum()
    num_skipped = evidence.admitted.num_skipped

    judged = ruling(evidence, "P7")

    assert judged.verdict is PromiseVerdict.PROVED
    assert 50 < num_skipped < 100
    sentence = f"{num_skipped} visits passed over by the curriculum, so no epoch is promised to be whole"
    assert judged.sentence.endswith(sentence)


def test_a_prompt_that_the_curriculum_passes_over_is_out_of_turn() -> None:
    evidence = under_a_curriculum()
    everything = {str(evidence.sampler.group_at(position)) for position in range(100, 200)}
    passed_over = min(everything - evidence.tickets)
    evidence.tickets |= {passed_over}

    assert refuted_ids(evidence, "P7", ViolationKind.OUT_OF_TURN) == [passed_over]


def test_a_record_that_counts_other_prompts_as_passed_over_disagrees() -> None:
    evidence = under_a_curriculum()
    evidence.admitted = msgspec.structs.replace(evidence.admitted, num_skipped=evidence.admitted.num_skipped - 1)

    assert refuted_ids(evidence, "P7", ViolationKind.DISAGREES) == ["admitted"]


def test_coverage_is_not_decidable_without_the_data() -> None:
    evidence = whole_run()
    evidence.rules = replace(evidence.rules, tasks=(), why_no_rows="no such file")

    judged = ruling(evidence, "P7")

    assert judged.verdict is PromiseVerdict.UNDECIDED
    assert judged.missing == ["the data: no such file"]
