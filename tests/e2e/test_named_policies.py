"""Runs with several policies: two roles of one model, and a frozen one whose tokens are never trained."""

import json
import os
import signal
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from areal_async.protocol.types import NOT_SAMPLED, Version
from tests.e2e.test_run import REPOSITORY, Run, assert_accounts, collect, continue_trainers, events, wait_until

pytestmark = [pytest.mark.timeout(300), pytest.mark.whole_runs]


def arguments(name: str) -> tuple[str, str]:
    return "--config", f"configs/{name}_cpu.yaml"


def test_self_play_trains_both_roles(tmp_path: Path) -> None:
    run = Run(tmp_path, "self_play", run__steps=2, eval__limit=4)

    ended = run.finish(*arguments("self_play"), workflow="workflows/self_play.py")

    assert ended.returncode == 0, ended.stdout
    assert_accounts(run, num_steps=2, max_staleness=2)
    assert all(line["failed"] == 0 for line in run.lines), run.lines
    assert all(0 <= line["info/share_legal_moves"] <= 1 for line in run.lines)
    assert any(0 < line["info/policy_wins"] < 1 for line in run.lines), "at first who begins loses: both have rows"
    evaluated = [json.loads(line) for line in (run.directory / "eval.jsonl").read_text().splitlines()]
    assert [one["step"] for one in evaluated] == [0, 2]


def test_frozen_grader_that_is_killed_comes_back_and_no_token_of_it_is_trained(tmp_path: Path) -> None:
    run = Run(tmp_path, "judge", run__steps=4, eval__limit=4)
    run.faults = "trainer.before_step:2:stop"  # else it may be over before the grader is back
    with run.start(*arguments("judge"), workflow="workflows/judge.py") as process:
        run.wait_for_fault("trainer.before_step", process)
        (first,) = grader_starts(run)
        os.killpg(int(first["pid"]), signal.SIGKILL)
        wait_until(lambda: len(grader_starts(run)) == 2, "the grader to start again")
        continue_trainers(run)
        ended = collect(process)

    assert ended.returncode == 0, ended.stdout
    assert_accounts(run, num_steps=4, max_staleness=2)
    assert [one["server_id"] for one in grader_starts(run)] == ["0-grader_0", "0-grader_0"]
    assert all(line["failed"] == 0 for line in run.lines), "an answer in the middle of its grading was to go on"
    assert all(0 <= line["info/right"] <= 1 for line in run.lines)
    assert_policy_s_own(run)


def grader_starts(run: Run) -> list[dict[str, object]]:
    return [one for one in events(run, "node-0", "server.started") if "grader" in str(one["server_id"])]


def assert_policy_s_own(run: Run) -> None:
    """Each trained row is one question and one answer; the grader's words and weights are in none of them."""
    tokenizer = AutoTokenizer.from_pretrained(REPOSITORY / "configs" / "models" / "tiny")
    for row in run.trained:
        (token_ids,), (versions,) = row["token_ids"], row["versions"]
        text = tokenizer.decode(token_ids)
        assert text.count("<|im_start|>") == 2
        assert "Score" not in text
        assert "Answer to grade" not in text
        sampled = {Version.unpack(version) for version in versions if version != NOT_SAMPLED}
        assert sampled
        assert min(sampled) >= Version(1, 0), "a frozen server says that it runs 0-0"
