"""What may change in a live run does, while its file says what it said then; the rest is refused with the reason."""

import math

import msgspec
import pytest

from areal_async.algorithms.presets import SURROGATES
from areal_async.config.algorithm import PRESETS
from areal_async.config.live import (
    LIVE,
    check_change,
    full_name,
    held_changes,
    live_names,
    settings_now,
    settings_of_step,
    step_numbers,
    value_of,
)
from areal_async.config.settings import AlgorithmSettings, RolloutSettings, Settings, TrainerSettings
from areal_async.config.tasks import DatasetSettings, EvalSettings, TaskSettings
from areal_async.errors import UserError
from areal_async.protocol.fields import MAX_STEP
from areal_async.protocol.run_state import Change, Changes

ROWS = DatasetSettings(path="rows.jsonl")
SETTINGS = Settings(
    rollout=RolloutSettings(max_staleness=4, max_trajectories_per_node=64), trainer=TrainerSettings(lr=2e-6)
)
EVALUATED = Settings(tasks=(TaskSettings(workflow="a.py", dataset=ROWS),), eval=EvalSettings(dataset=ROWS))


def _changes(**by_setting: float) -> Changes:
    given = {
        "trainer.lr": 2e-6,
        "rollout.max_staleness": 4,
        "rollout.max_trajectories_per_node": 64,
        "eval.every_steps": 0,
    }
    named = {name.replace("__", "."): value for name, value in by_setting.items()}
    return Changes(by_setting={name: Change(value=value, given=given[name]) for name, value in named.items()})


def test_what_was_changed_holds_and_the_rest_is_as_it_was() -> None:
    now = settings_now(SETTINGS, _changes(trainer__lr=1e-6, rollout__max_staleness=2))

    assert (now.trainer.lr, now.rollout.max_staleness) == (1e-6, 2)
    assert isinstance(now.rollout.max_staleness, int)
    assert now.model_copy(update={"trainer": SETTINGS.trainer, "rollout": SETTINGS.rollout}) == SETTINGS


def test_whoever_starts_the_run_with_another_value_has_decided_anew() -> None:
    resumed = SETTINGS.model_copy(update={"trainer": TrainerSettings(lr=5e-6)})
    changes = _changes(trainer__lr=1e-6, rollout__max_staleness=2)

    assert dict(held_changes(resumed, changes)) == {"rollout.max_staleness": 2}
    assert settings_now(resumed, changes).trainer.lr == 5e-6


def test_a_change_that_the_settings_of_a_resumed_run_forbid_does_not_hold() -> None:
    changes = Changes(by_setting={"eval.every_steps": Change(value=0, given=SETTINGS.eval.every_steps)})
    resumed = EVALUATED.model_copy(update={"trainer": TrainerSettings(keep_best="accuracy")})

    assert dict(held_changes(SETTINGS, changes)) == {"eval.every_steps": 0}
    assert dict(held_changes(resumed, changes)) == {}
    with pytest.raises(UserError, match=r"eval.every_steps: got 0: trainer.keep_best"):
        check_change(resumed, Changes(), "eval.every_steps", 0)


def test_a_change_of_what_is_no_live_setting_is_passed_over() -> None:
    foreign = Changes(by_setting={"run.steps": Change(value=3, given=SETTINGS.run.steps)})

    assert dict(held_changes(SETTINGS, foreign)) == {}


def _mixed(*ratios: float) -> Settings:
    tasks = [
        TaskSettings(workflow=f"{name}.py", dataset=ROWS, ratio=one) for name, one in zip("abc", ratios, strict=False)
    ]
    return Settings(tasks=tuple(tasks))


def test_a_task_can_be_named_by_its_workflow() -> None:
    assert full_name(_mixed(1.0, 1.0), "tasks.b.ratio") == "tasks.1.ratio"
    assert full_name(_mixed(1.0, 1.0), "tasks.d.ratio") == "tasks.d.ratio"
    assert check_change(_mixed(1.0, 1.0), Changes(), "tasks.1.ratio", 0) == 0


def test_one_task_at_least_stays_on() -> None:
    off = Changes(by_setting={"tasks.0.ratio": Change(value=0, given=1.0)})

    with pytest.raises(UserError, match="need one over 0"):
        check_change(_mixed(1.0, 1.0), off, "tasks.1.ratio", 0)
    with pytest.raises(UserError, match="the run has one task"):
        check_change(_mixed(1.0), Changes(), "tasks.0.ratio", 2.0)


def test_the_sampling_of_an_only_task_can_change() -> None:
    assert check_change(_mixed(1.0), Changes(), "tasks.0.sampling.temperature", 0.9) == 0.9


@pytest.mark.parametrize("index", ["01", "\u0661", "1" * 5000, "-1", "2", ""])
def test_a_task_has_no_other_number_than_its_own(index: str) -> None:
    settings = _mixed(1.0, 1.0)
    key = full_name(settings, f"tasks.{index}.ratio")
    foreign = Changes(by_setting={key: Change(value=0, given=1.0)})

    with pytest.raises(UserError, match="no such setting"):
        check_change(settings, Changes(), key, 0)
    assert dict(held_changes(settings, foreign)) == {}


def test_a_name_that_is_suggested_is_one_that_can_be_given() -> None:
    with pytest.raises(UserError, match=r"did you mean tasks\.1\.ratio"):
        check_change(_mixed(1.0, 1.0), Changes(), "tasks.1.ration", 0)
    with pytest.raises(UserError, match=r"did you mean tasks\.b\.ratio"):
        check_change(_mixed(1.0, 1.0), Changes(), full_name(_mixed(1.0, 1.0), "tasks.bb.ratio"), 0)
    with pytest.raises(UserError, match=r"need one of [^*]*tasks\.0\.ratio[^*]*$"):
        check_change(_mixed(1.0, 1.0), Changes(), "xyzzy", 0)


def test_evaluations_of_held_out_rows_change_their_rhythm() -> None:
    assert check_change(EVALUATED, Changes(), "eval.every_steps", 3) == 3


@pytest.mark.parametrize("value", [MAX_STEP, 1e-300])
def test_a_change_that_is_taken_can_be_read_again(value: float) -> None:
    key = "trainer.checkpoint_every_steps" if isinstance(value, int) else "trainer.lr"
    change = Change(value=check_change(SETTINGS, Changes(), key, value), given=value_of(SETTINGS, key))
    read = msgspec.json.decode(msgspec.json.encode(Changes(by_setting={key: change})), type=Changes)

    assert dict(held_changes(SETTINGS, read)) == {key: value}


def test_a_change_that_a_younger_one_makes_possible_holds() -> None:
    """The first task was switched off after the second was switched on, which was changed once more since."""
    changes = Changes(
        by_setting={
            "tasks.0.ratio": Change(value=0, given=1.0, at="2026-01-01T00:00:01"),
            "tasks.1.ratio": Change(value=2, given=0.0, at="2026-01-01T00:00:02"),
        }
    )

    assert [task.ratio for task in settings_now(_mixed(1.0, 0.0), changes).tasks] == [0.0, 2.0]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.lr", 1e-7),
        ("rollout.max_staleness", 1),
        ("rollout.max_trajectories_per_node", 8),
        ("rollout.sampling.temperature", 0.8),
        ("rollout.sampling.max_new_tokens", 512),
        ("trainer.checkpoint_every_steps", 3),
        ("algorithm.entropy_coef", 0.01),
        ("algorithm.eps_clip_higher", 0.28),
        ("health.logprob_gap", 0.5),
    ],
)
def test_safe_changes_are_taken(key: str, value: float) -> None:
    assert key in LIVE
    assert check_change(SETTINGS, Changes(), key, value) == value


def test_a_run_cuts_tokens_away_from_now_on_only_where_it_accepts_the_bias() -> None:
    accepts = SETTINGS.model_copy(
        update={"rollout": SETTINGS.rollout.model_copy(update={"accept_truncation_bias": True})}
    )
    for key, value in (("top_p", 0.9), ("top_k", 20), ("min_p", 0.1), ("temperature", 0)):
        setting = f"rollout.sampling.{key}"
        with pytest.raises(UserError, match=f"{setting.rpartition('.')[0]}: got {key}={value:g}; .*accept_truncation"):
            check_change(SETTINGS, Changes(), setting, value)
        assert check_change(accepts, Changes(), setting, value) == value


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("trainer.lr", -1.0, "trainer.lr: got -1.0: Input should be greater than 0"),
        ("trainer.lr", "much", "trainer.lr: got 'much', need a number"),
        ("trainer.lr", True, "need a number"),
        ("rollout.max_staleness", 1.5, "valid integer"),
        ("rollout.max_staleness", 5, "need at most 4"),
        ("rollout.max_staleness", 0, "must be started anew"),
        ("trainer.lrr", 1.0, "no such setting; did you mean trainer.lr"),
        ("model.path", 1.0, "the weights so far were trained from it; start another one"),
        ("rollout.group_size", 4, "which data the run is made of"),
        ("model.dtype", 1.0, "sampled and trained in it"),
        ("algorithm.name", 1.0, "rewards became advantages by it"),
        ("algorithm.loss", 1.0, "graph of a step"),
        ("rollout.sampling.temperature", -0.5, "greater than or equal to 0"),
        ("rollout.sampling.top_p", 1.5, "less than or equal to 1"),
        ("rollout.sampling.top_k", 0.5, "valid integer"),
        ("rollout.sampling.top_k", 0, "need -1 or at least 1"),
        ("rollout.sampling.top_k", 1 << 31, "less than or equal to 2147483647"),
        ("eval.every_steps", 3, "no held-out rows to evaluate; stop it, set eval.dataset, and start it again"),
        ("trainer.lr", math.inf, "need a finite one"),
        ("trainer.lr", math.nan, "need a finite one"),
        ("health.logprob_gap", 10**400, "need a finite one"),
        pytest.param(
            "trainer.checkpoint_every_steps",
            10**5000,
            "need a finite one of at most 9007199254740992",
            id="5001 digits",
        ),
        ("trainer.checkpoint_every_steps", (1 << 53) + 1, "need a finite one"),
        ("rollout.sampling.max_new_tokens", 1025, "need at most 1024: memory and token budget"),
        ("rollout.sampling.ignore_eos", 1, "only its numbers can; stop the run, and start it with"),
        ("tasks.0.sampling.temperature", 0.5, "no such setting"),
        ("trainer.warmup_steps", 3, "stop the run, and start it with --trainer.warmup_steps"),
        ("trainer.checkpoint_every_steps", 0, "greater than or equal to 1"),
        ("trainer.critic.lr", 1e-5, "has no critic"),
        ("algorithm.kl_coef", 0.1, "algorithm.kl_coef: is 0.0: with a reference model and without the run must be"),
        ("run.steps", 3, "read at the start"),
    ],
)
def test_what_is_unsafe_is_refused_with_its_reason(key: str, value: object, reason: str) -> None:
    with pytest.raises(UserError) as refusal:
        check_change(SETTINGS, Changes(), key, value)

    assert reason in str(refusal.value)


def test_the_sampling_of_one_task_changes_alone() -> None:
    settings = _with_tasks({}, {"sampling": {"max_new_tokens": 2000}})
    keys = {"tasks.0.sampling.temperature": 0.5, "tasks.1.sampling.max_new_tokens": 1500}

    changes = Changes(
        by_setting={
            key: Change(value=check_change(settings, Changes(), key, value), given=value_of(settings, key))
            for key, value in keys.items()
        }
    )

    now = settings_now(settings, changes)
    assert dict(held_changes(settings, changes)) == keys
    assert [now.rollout_of(f"w{number}").sampling.temperature for number in (0, 1)] == [0.5, 1.0]
    assert [now.rollout_of(f"w{number}").sampling.max_new_tokens for number in (0, 1)] == [1024, 1500]
    assert isinstance(now.tasks[1].sampling.max_new_tokens, int)


@pytest.mark.parametrize(("task", "most"), [(0, 1024), (1, 2000)])
def test_the_answers_of_a_task_are_at_most_as_long_as_they_were_when_the_run_was_started(task: int, most: int) -> None:
    settings = _with_tasks({}, {"sampling": {"max_new_tokens": 2000}})
    key = f"tasks.{task}.sampling.max_new_tokens"

    assert check_change(settings, Changes(), key, most) == most
    with pytest.raises(UserError, match=rf"{key}: got {most + 1}, need at most {most}: memory"):
        check_change(settings, Changes(), key, most + 1)


def test_what_is_taken_off_long_answers_keeps_the_longest_as_it_was_given() -> None:
    key = "rollout.sampling.max_new_tokens"
    changes = Changes(by_setting={key: Change(value=512, given=1024)})
    penalised = Settings.model_validate({"algorithm": {"name": "dapo"}})
    told = Settings.model_validate({"algorithm": {"name": "dapo", "overlong_max": 1024}})

    with pytest.raises(UserError, match=r"need what the run was started with: .*dapo.* set algorithm.overlong_max"):
        check_change(penalised, Changes(), key, 512)
    assert dict(held_changes(penalised, changes)) == {}, "made before, under another algorithm"
    assert check_change(told, Changes(), key, 512) == 512
    assert dict(held_changes(told, changes)) == {key: 512}


@pytest.mark.parametrize("name", ["eps_clip", "eps_clip_higher"])
def test_a_clip_range_changes_only_where_the_loss_clips(name: str) -> None:
    key = f"algorithm.{name}"
    for preset in PRESETS:
        settings = Settings.model_validate({"algorithm": {"name": preset}})
        if algorithm_clips(settings.algorithm):
            assert check_change(settings, Changes(), key, 0.3) == 0.3
            assert key in live_names(settings)
            continue
        with pytest.raises(UserError) as refusal:
            check_change(settings, Changes(), key, 0.3)
        assert str(refusal.value) == (
            f"{key}: got algorithm.name={preset}, algorithm.loss={settings.algorithm.loss}, "
            "need loss=ppo_clip or cispo; leave it as it is"
        )
        assert key not in live_names(settings)


def algorithm_clips(algorithm: AlgorithmSettings) -> bool:
    """Whether its loss of a token is given the clip range."""
    return "eps_clip" in SURROGATES[algorithm.loss][1]


def test_no_name_is_told_of_what_this_run_has_not() -> None:
    names = set(live_names(_with_tasks({})))
    penalised = set(live_names(Settings.model_validate({"algorithm": {"name": "dapo"}})))

    absent = {"eval.every_steps", "algorithm.kl_coef", "trainer.critic.lr", "tasks.0.ratio", "tasks.w0.ratio"}
    assert not names & absent
    assert {"algorithm.entropy_coef", "tasks.w0.sampling.top_p", "rollout.sampling.max_new_tokens"} < names
    assert "rollout.sampling.max_new_tokens" not in penalised
    assert "eval.every_steps" in live_names(EVALUATED)
    assert {"algorithm.kl_coef", "trainer.critic.lr"} < set(live_names(PPO))


def test_every_name_that_is_told_is_one_of_a_live_setting() -> None:
    settings = _with_tasks({}, {})
    names = live_names(settings)

    assert {"trainer.lr", "tasks.1.ratio", "tasks.w1.sampling.top_p"} < set(names)
    for name in names:
        value_of(settings, full_name(settings, name))


def _with_tasks(*given: dict[str, object]) -> Settings:
    tasks = [{"workflow": f"w{number}.py", "dataset": {"path": "rows"}, **one} for number, one in enumerate(given)]
    return Settings.model_validate({"tasks": tasks})


PPO = Settings(algorithm=AlgorithmSettings(name="ppo", kl_coef=0.1), trainer=TrainerSettings(lr=1e-6))


def test_a_step_is_trained_with_what_its_cut_says_whatever_the_settings_say_now() -> None:
    changes = Changes(
        by_setting={
            "trainer.critic.lr": Change(value=1e-4, given=None),
            "algorithm.kl_coef": Change(value=0.3, given=0.1),
        }
    )
    numbers = step_numbers(settings_now(PPO, changes))
    resumed = PPO.model_copy(update={"algorithm": AlgorithmSettings(name="ppo", kl_coef=0.2, eps_clip_higher=0.5)})

    cut = settings_of_step(PPO, lr=1e-6, numbers=numbers)
    replayed = settings_of_step(resumed, lr=2e-6, numbers=numbers)

    assert (cut.trainer.for_role("critic").lr, cut.algorithm.kl_coef, cut.trainer.lr) == (1e-4, 0.3, 1e-6)
    assert (replayed.trainer.for_role("critic").lr, replayed.algorithm.kl_coef, replayed.trainer.lr) == (
        1e-4,
        0.3,
        2e-6,
    )
    assert replayed.algorithm.eps_clip_higher is None
    assert settings_of_step(PPO, lr=0.0, numbers={}) == PPO, "a cut of before says nothing"


def test_a_critic_without_a_rate_of_its_own_follows_the_policys() -> None:
    assert settings_of_step(PPO, lr=3e-6, numbers=step_numbers(PPO)).trainer.for_role("critic").lr == 3e-6


def test_a_step_does_not_ask_for_a_model_that_a_resumed_run_is_without() -> None:
    without = Settings(algorithm=AlgorithmSettings(name="grpo"))

    now = settings_of_step(without, lr=1e-6, numbers=step_numbers(PPO) | {"trainer.critic.lr": 1e-4, "run.steps": 3})

    assert (now.algorithm.needs_models, now.trainer.critic.lr, now.run.steps) == ((), None, without.run.steps)
