"""Tasks share a run and differ where they say so; what cannot differ, or does not fit, is refused in one sentence."""

import re
from typing import Any

import pytest
from pydantic import ValidationError

from areal_async.config.settings import DatasetSettings, Settings

ROWS = {"path": "rows.jsonl"}
RUN = {"group_size": 8, "min_group_size": 4, "sampling": {"temperature": 0.9, "max_new_tokens": 100}}


def settings_of(*tasks: dict[str, Any], **sections: Any) -> Settings:
    given = [{"workflow": f"w{number}.py", "dataset": ROWS, **task} for number, task in enumerate(tasks)]
    return Settings.model_validate({"tasks": given, "rollout": RUN, **sections})


def test_what_cuts_tokens_away_is_named_by_the_setting_that_says_so_and_evaluation_and_frozen_models_are_free() -> None:
    rows = {"dataset": {"path": "none"}}
    table: list[tuple[dict[str, Any], str]] = [
        ({}, ""),
        ({"rollout": {"sampling": {"top_p": 0.9}}}, "rollout.sampling: got top_p=0.9; "),
        ({"rollout": {"sampling": {"top_k": 50}, "accept_truncation_bias": True}}, ""),
        ({"tasks": [{**rows, "sampling": {"min_p": 0.1}}]}, "tasks.0.sampling: got min_p=0.1; "),
        ({"tasks": [{**rows, "sampling": {"top_p": 1.0}}], "rollout": {"sampling": {"top_p": 0.9}}}, ""),
        ({"rollout": {"sampling": {"temperature": 0}}}, "rollout.sampling: got temperature=0; "),
        ({"policies": {"opponent": {"sampling": {"top_k": 1}}}}, "policies.opponent.sampling: got top_k=1; "),
        ({"policies": {"judge": {"path": "org/judge", "sampling": {"temperature": 0}}}}, ""),
    ]
    for given, problem in table:
        settings = Settings.model_validate(given)
        if problem:
            with pytest.raises(ValueError, match=f"^{re.escape(problem)}.*rollout.accept_truncation_bias=true"):
                settings.check_trained_sampling()
        else:
            settings.check_trained_sampling()


def test_a_task_has_what_it_says_and_the_rest_of_the_run() -> None:
    settings = settings_of(
        {}, {"group_size": 2, "min_group_size": 1, "episode_deadline_s": 9, "sampling": {"stop": ["x"], "top_k": 5}}
    )

    own = settings.rollout_of("w1")

    assert settings.rollout_of("w0") is settings.rollout
    assert (own.group_size, own.min_group_size, own.episode_deadline_s, own.group_deadline_s) == (2, 1, 9, 69)
    assert own.sampling == settings.rollout.sampling.model_copy(update={"stop": ("x",), "top_k": 5})
    assert own.max_staleness == settings.rollout.max_staleness
    assert settings.max_group_size == 8


@pytest.mark.parametrize(
    ("task", "sections", "sentence"),
    [
        ({"sampling": {"temperature": -1}}, {}, "greater than or equal to 0"),
        ({"sampling": {"top_k": 0}}, {}, "top_k\n.* got 0, need -1 or at least 1"),
        ({"group_size": 2}, {}, "tasks.1: min_group_size must not exceed group_size, got min_group_size=4, group_siz"),
        ({"group_size": 1 << 12}, {}, "tasks.1: max_stream_bytes: got .* room for a group of 4096"),
        (
            {"sampling": {"max_new_tokens": 50}},
            {"algorithm": {"name": "dapo"}},
            "tasks.1.sampling.max_new_tokens: got 50 with algorithm.name=dapo.* set algorithm.overlong_max",
        ),
    ],
)
def test_what_a_task_cannot_have_is_refused(task: dict[str, Any], sections: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        settings_of({}, task, **sections)


def test_a_task_may_have_a_temperature_of_its_own() -> None:
    settings = settings_of({"sampling": {"temperature": 0.5}}, {})

    assert [settings.rollout_of(name).sampling.temperature for name in ("w0", "w1")] == [0.5, 0.9]


def test_every_task_may_have_held_out_rows_and_the_runs_are_the_first_tasks() -> None:
    own = {"eval": {"dataset": {"path": "own.jsonl"}, "limit": 3}}

    settings = settings_of({"eval": {"limit": 5}}, own, {}, eval={"dataset": {"path": "run.jsonl"}, "limit": 7})

    assert [(task.name, dataset, limit) for task, dataset, limit in settings.held_out] == [
        ("w0", DatasetSettings(path="run.jsonl"), 5),
        ("w1", DatasetSettings(path="own.jsonl"), 3),
    ]
    assert settings_of({}).held_out == []
    with pytest.raises(ValidationError, match="beside tasks.0.eval.dataset, need one of them"):
        settings_of(own, eval={"dataset": ROWS})


def test_a_curriculum_whose_bounds_cross_is_refused() -> None:
    with pytest.raises(ValidationError, match="unsolved: got 0.9, need less than solved=0.5"):
        settings_of({}, rollout={"curriculum": {"name": "pass_rate", "solved": 0.5, "unsolved": 0.9}})


def test_held_out_rows_are_answered_greedily_or_several_times_as_in_training() -> None:
    task, rows = {"sampling": {"temperature": 0.5}}, {"dataset": ROWS}
    greedy, sampled = (settings_of({}, task, eval=rows | {"samples": samples}) for samples in (1, 8))

    assert greedy.eval_sampling_of("w1") == greedy.rollout_of("w1").sampling.greedy
    assert sampled.eval_sampling_of("w1") == sampled.rollout_of("w1").sampling
    with pytest.raises(
        ValidationError, match="eval.samples: got 8 with a temperature of 0 for w0, which answers alike"
    ):
        settings_of({"sampling": {"temperature": 0}}, eval=rows | {"samples": 8})
