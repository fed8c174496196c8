"""The step of every preset is a graph that can run: its calls, their order and the models that they need."""

from pathlib import Path
from typing import Any

import pytest

from areal_async.algorithms.dataflow import Graph
from areal_async.algorithms.graphs import ELSEWHERE, roles, step_graph
from areal_async.config.algorithm import PRESETS
from areal_async.config.settings import AlgorithmSettings, Settings
from areal_async.errors import UserError


def graph_of(algorithm: dict[str, Any]) -> Graph:
    return step_graph(Settings(algorithm=AlgorithmSettings.model_validate(algorithm)))


def calls(graph: Graph) -> list[str]:
    return [call.name for call in graph.calls if call.name not in ELSEWHERE]


def inputs(graph: Graph, name: str) -> tuple[str, ...]:
    return next(call.inputs for call in graph.calls if call.name == name)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("kl_in", ["loss", "reward", None])
@pytest.mark.parametrize("num_minibatches", [1, 4])
def test_the_step_of_every_preset_fits_together(name: str, kl_in: str | None, num_minibatches: int) -> None:
    kl = {"kl_in": kl_in, "kl_coef": 0.1} if kl_in else {}

    graph = graph_of({"name": name, "num_minibatches": num_minibatches, **kl})

    rest = graph.rest(ELSEWHERE)
    assert rest.checked(roles(AlgorithmSettings.model_validate({"name": name, **kl}))) == rest
    assert ("start_logprobs" in calls(graph)) == (num_minibatches > 1 or kl_in == "reward")
    assert ("reference_logprobs" in calls(graph)) == (kl_in is not None)


def test_without_other_models_the_policy_is_trained_and_nothing_else() -> None:
    assert calls(graph_of({"name": "grpo"})) == ["train_actor"]


def test_ppo_asks_its_critic_then_trains_both() -> None:
    graph = graph_of({"name": "ppo"})

    assert calls(graph) == ["values", "gae", "train_critic", "train_actor"]
    assert inputs(graph, "gae") == ("rows", "outcomes", "values")


def test_a_penalty_in_the_reward_comes_before_the_advantages() -> None:
    graph = graph_of({"name": "ppo", "kl_coef": 0.1, "kl_in": "reward"})

    assert calls(graph)[:5] == ["start_logprobs", "reference_logprobs", "values", "kl_penalty", "gae"]
    assert inputs(graph, "gae") == ("rows", "outcomes", "values", "penalties")
    assert "reference_logprobs" not in inputs(graph, "train_actor")


def test_a_penalty_in_the_loss_is_the_losss_business() -> None:
    graph = graph_of({"name": "grpo", "kl_coef": 0.1})

    assert inputs(graph, "train_actor") == ("rows", "advantages", "reference_logprobs")


def test_a_loglinear_proximal_policy_needs_no_pass() -> None:
    assert calls(graph_of({"proximal": "loglinear", "num_minibatches": 4})) == ["train_actor"]


def test_a_call_of_the_users_own_stands_before_the_training(tmp_path: Path) -> None:
    file = tmp_path / "clip.py"
    file.write_text("import nothing_there\n\ndef advantages(rows, advantages):\n    return advantages\n")

    graph = graph_of({"name": "ppo", "calls": [f"{file}:advantages"]})

    assert calls(graph) == ["values", "gae", "train_critic", "clip_advantages", "train_actor"]
    assert inputs(graph, "clip_advantages") == ("rows", "advantages_before_clip_advantages")


@pytest.mark.parametrize(
    ("text", "name", "sentence"),
    [
        ("def advantages(rows, advantages): ...", "credit", "no function credit in"),
        ("def advantages(rows, advantages): ...", "", "need FILE.py:name"),
        ("def advantages(*all): ...", "advantages", "takes more than named values"),
        ("def advantages(", "advantages", "is not Python"),
        ("def advantages(judgement): ...", "advantages", "advantages is made by batch and by"),
        ("def credit(judgement): ...", "credit", "takes judgement, which nobody makes"),
        ("def credit(rows): ...", "credit", "makes credit, which nobody takes"),
        ("def rewards(rewards): ...", "rewards", "makes rewards, which nobody takes"),
    ],
)
def test_a_wrong_call_of_the_users_own_is_one_sentence(text: str, name: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(text)

    with pytest.raises(UserError, match=sentence):
        graph_of({"calls": [f"{file}:{name}"]})


@pytest.mark.parametrize(("made", "algorithm"), [("rows", {}), ("outcomes", {"kl_coef": 0.1, "kl_in": "reward"})])
def test_a_call_that_would_part_rows_from_what_is_told_of_them_is_refused(
    tmp_path: Path, made: str, algorithm: dict[str, Any]
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"def {made}({made}):\n    return {made}\n")

    with pytest.raises(UserError, match="need advantages"):
        step_graph(Settings(algorithm=AlgorithmSettings(calls=(f"{file}:{made}",), **algorithm)))
