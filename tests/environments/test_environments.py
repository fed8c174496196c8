"""Environments of other libraries as they are: found, tried and trained by the command that takes a workflow."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from areal_async.config.settings import DatasetSettings
from areal_async.config.sources import load_settings
from areal_async.data.recorded_rows import Used, refuse_other_rows
from areal_async.data.rows import load_rows
from areal_async.environments.openenv import OpenEnvironment, OpenEnvOptions
from areal_async.environments.verifiers import VerifiersEnvironment, VerifiersOptions
from areal_async.errors import UserError, WorkflowError

ROOT = Path(__file__).parents[2]
TASKSETS = Path(__file__).with_name("tasksets")
pytestmark = pytest.mark.environments
WORDS = ("able", "bread", "chair", "house", "light", "table", "water", "stone")
LETTERS = "EATRBZQX"
TAUGHT = """
run: {name: taught, steps: 24, seed: 1}
model: {path: MODEL, dtype: float32}
dataset: {path: lessons.jsonl}
trainer: {lr: 2.0e-3, warmup_steps: 4, batch_sequences: 8, token_budget: 8192, num_threads: 1}
eval: {limit: 8}
"""
QUICK = """
run: {steps: 20, seed: 1}
model: {path: MODEL, dtype: float32}
rollout: {group_size: 8, min_group_size: 4, batch_groups: 8, max_staleness: 0, sampling: {max_new_tokens: 8}}
inference: {backend: embedded}
trainer: {num_ranks: 1, lr: 3.0e-4, warmup_steps: 2, token_budget: 4096, num_threads: 1}
"""
"""Settings of environments without any of their own."""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "quick.yaml"
    file.write_text(QUICK.replace("MODEL", str(ROOT / "configs/models/tiny_tools")))
    return file


@pytest.fixture
def tasksets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the tests' own tasksets as if they were installed, also in what is started."""
    monkeypatch.syspath_prepend(str(TASKSETS))
    monkeypatch.setenv("PYTHONPATH", str(TASKSETS))


def areal(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "areal_async", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500, env=os.environ)


def tried(*words: str) -> list[dict[str, Any]]:
    done = areal("try", *words, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def metrics_of(directory: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / name / "metrics.jsonl").read_text().splitlines()]


def assert_engine_s_own(steps: list[dict[str, Any]]) -> None:
    """What the trainer computes of every recorded token is what the engine said of it, of which it sampled more.

    It can be told only of tokens of the weights that are trained: the run has ``max_staleness=0``.
    """
    assert [one["num_current_tokens"] for one in steps] == [one["num_tokens"] for one in steps]
    assert max(one["logprob_gap_max"] for one in steps) < 1e-3
    assert min(one["entropy_mean"] for one in steps) > 0, "nothing can be told of tokens that are certain"


def test_seeds_of_gymnasium_follow_from_the_place_of_the_row() -> None:
    env = {"file": str(ROOT / "workflows/nim_environment.py"), "num_tasks": 3, "first_seed": 7}

    rows = load_rows(DatasetSettings(environment="gym:Nim-v0", env=env))

    assert rows["seed"] == [7, 8, 9]
    assert rows["task_id"] == ["Nim-v0-7", "Nim-v0-8", "Nim-v0-9"]
    assert len(set(rows["sha256"])) == 3


def test_an_environment_that_gymnasium_does_not_know_is_said_before_a_run() -> None:
    with pytest.raises(UserError, match=r"gym:Nowhere-v0: .*; name the file that registers it with --env.file"):
        load_rows(DatasetSettings(environment="gym:Nowhere-v0"))


def test_a_gymnasium_environment_is_played_with_a_return_for_each_reply() -> None:
    (told,) = [one for one in tried("gym:Nim-v0", "--index", "1") if "reward" in one]

    assert told["status"] == "scored"
    assert told["info"]["env/num_steps"] >= 1


@pytest.mark.usefixtures("tasksets")
def test_a_taskset_is_read_with_the_packages_own_hashes() -> None:
    env = {"select": {"limit": 3}, "taskset": {"most_stones": 4}}

    rows = load_rows(DatasetSettings(environment="verifiers:nim_moves", env=env))

    assert rows["task_id"] == ["move-0", "move-1", "move-2"]
    assert all(re.fullmatch("[0-9a-f]{64}", one) for one in rows["sha256"])
    with pytest.raises(UserError, match="verifiers:nowhere_at_all: ModuleNotFoundError"):
        load_rows(DatasetSettings(environment="verifiers:nowhere_at_all"))
    with pytest.raises(UserError, match="most_stoned"):
        load_rows(DatasetSettings(environment="verifiers:nim_moves", env={"taskset": {"most_stoned": 4}}))


@pytest.mark.usefixtures("tasksets")
@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({"taskset": {"most_stones": 3}}, "task 2, move-2, has another content"),
        ({"select": {"limit": 2}}, "task 2 was move-2, is none"),
        ({"select": {"limit": 3, "shuffle": True}}, "task 0 was move-0, is move-"),
    ],
)
def test_a_run_does_not_go_on_with_another_taskset(other: dict[str, Any], told: str, tmp_path: Path) -> None:
    def used(env: dict[str, Any]) -> list[Used]:
        source = DatasetSettings(environment="verifiers:nim_moves", env=env)
        return [Used("tasks.0.dataset", source, load_rows(source, shows_progress=False))]

    env = {"select": {"limit": 3}, "taskset": {"most_stones": 4}}
    for _ in range(2):
        refuse_other_rows(tmp_path / "rows.json", used(env), run="mine")

    with pytest.raises(UserError, match=re.escape(f"has recorded at its start ({told}")):
        refuse_other_rows(tmp_path / "rows.json", used(env | other), run="mine")


@pytest.mark.usefixtures("tasksets")
def test_a_taskset_is_played_by_its_harness_and_its_rewards_and_metrics_come_back(config: Path) -> None:
    told = [one for one in tried("verifiers:nim_moves", "--config", str(config), "--n", "3") if "reward" in one]

    assert [one["status"] for one in told] == ["scored"] * 3
    assert all(one["reward"] == one["info"]["env/reward_is_legal"] for one in told)
    assert all(one["info"]["env/length"] > 0 for one in told)


@pytest.mark.usefixtures("tasksets")
def test_the_harness_that_only_talks_is_named_as_the_package_names_it() -> None:
    """Its name, ``null``, is nothing in YAML, and the package's own default runs what the model writes."""
    settings = load_settings(None, ["--env.agent.harness.id", "null", "--env.agent.max_turns", "3"])

    environment = VerifiersEnvironment("nim_moves", VerifiersOptions.read(settings.env, what="verifiers:nim_moves"))

    agent = environment._load().config.agent
    assert (agent.harness.id, agent.max_turns) == ("null", 3)


@asynccontextmanager
async def server(*answers: str) -> AsyncIterator[str]:
    """Serve OpenEnv's protocol on this host, with those answers one after the other; yield the address."""
    from websockets.asyncio.server import serve

    async def answer(connection: Any) -> None:
        left: Iterator[str] = iter(answers)
        async for _ in connection:
            await connection.send(next(left))

    async with serve(answer, "127.0.0.1", 0) as serving:
        yield f"http://127.0.0.1:{serving.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        ("no JSON", "reset was answered by what is no answer of OpenEnv"),
        ('{"type": "observation", "data": {"reward": "much"}}', "Expected `float | null`"),
        ('{"type": "error", "data": {"code": "CAPACITY_REACHED", "message": "full"}}', "lower env.max_sessions"),
        ('{"type": "observation", "data": {"observation": {"seen": 1}}}', "has no text 'text', its fields are seen"),
    ],
)
def test_what_a_server_of_openenv_may_not_say_is_a_failure_with_its_reason(answer: str, sentence: str) -> None:
    from areal_async.protocol.types import Prompt

    async def play() -> None:
        async with server(answer) as url:
            environment = OpenEnvironment(url, OpenEnvOptions(observation_key="text"))
            async with environment.on_node():
                prompt = Prompt(epoch=0, index=0, row={"seed": 1})
                await environment.episode(prompt, None)  # type: ignore[arg-type]

    with pytest.raises(WorkflowError, match=re.escape(sentence)):
        anyio.run(play)


def test_a_server_that_is_not_there_is_said_before_any_episode() -> None:
    async def enter() -> None:
        async with OpenEnvironment("http://127.0.0.1:1", OpenEnvOptions()).on_node():
            pass

    with pytest.raises(WorkflowError, match=r"openenv:http://127.0.0.1:1: .*Errno 111"):
        anyio.run(enter)
    with pytest.raises(UserError, match="got no address of a server"):
        OpenEnvironment("localhost", OpenEnvOptions())


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("tasksets")
@pytest.mark.parametrize("spec", ["gym:Nim-v0", "verifiers:nim_moves"])
def test_twenty_steps_raise_the_reward_and_the_tokens_are_those_of_the_engine(
    spec: str, config: Path, tmp_path: Path
) -> None:
    given = ["--rollout.max_staleness", "0"] if spec.startswith("gym") else ["--config", str(config)]

    done = areal("run", spec, *given, "--run.directory", str(tmp_path), "--run.name", "n", "--run.steps", "20")

    assert done.returncode == 0, done.stdout + done.stderr
    steps = metrics_of(tmp_path, "n")
    rewards = [one["reward_mean"] for one in steps]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:2]) / 2 + 0.2, rewards
    assert_engine_s_own(steps)


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("tasksets")
def test_a_game_of_textarena_is_trained_over_its_turns(
    config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The taskset is the package's and plays TextArena's own Hangman; of the words, which it would download, there are
    a few here. The tiny model has learned before to name a letter, as the game wants it."""
    words = tmp_path / "nltk_data/corpora/words"
    words.mkdir(parents=True)
    for name in ("en", "en-basic"):
        (words / name).write_text("\n".join(WORDS))
    monkeypatch.setenv("NLTK_DATA", str(tmp_path / "nltk_data"))
    model = tmp_path / "model"
    shutil.copytree(ROOT / "configs/models/tiny_tools", model)
    for file, name in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
        (model / file).write_text(re.sub(rf'("{name}": )512', r"\g<1>3072", (model / file).read_text()))
    game = ["--env.taskset.game", "Hangman-v0", "--env.select.limit", "16", "--env.player.harness.id", "nim_moves"]
    options = VerifiersOptions.read(load_settings(None, game).env, what="verifiers:textarena")
    with (tmp_path / "lessons.jsonl").open("w") as lessons:
        tasks = VerifiersEnvironment("textarena", options)._selected()
        for place, letter in enumerate(LETTERS * 8):
            asked = tasks[place % len(tasks)].data
            said = [{"role": "system", "content": asked.system_prompt}, {"role": "user", "content": asked.prompt}]
            print(json.dumps({"question": said, "answer": f"[{letter}]"}), file=lessons)
    (tmp_path / "taught.yaml").write_text(TAUGHT.replace("MODEL", str(model)))
    directory = ["--run.directory", str(tmp_path)]
    taught = areal("sft", "--config", str(tmp_path / "taught.yaml"), *directory)
    assert taught.returncode == 0, taught.stdout + taught.stderr

    known = ["--model.path", str(tmp_path / "taught/model"), "--rollout.batch_groups", "2"]
    done = areal("run", "verifiers:textarena", *game, "--config", str(config), *known, *directory, "--run.name", "h")

    assert done.returncode == 0, done.stdout + done.stderr
    steps = metrics_of(tmp_path, "h")
    assert len(steps) == 20
    assert all(one["failed"] == 0 for one in steps)
    assert sum(one["reward_mean"] for one in steps) > 0
    assert sum(one["info/env/num_turns"] for one in steps) / len(steps) > 2
    assert_engine_s_own(steps)
