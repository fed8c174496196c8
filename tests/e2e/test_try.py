"""``try`` as a user calls it, with the real embedded engine: its own, or one that runs already."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.inference.embedded_engine import Server

REPOSITORY = Path(__file__).resolve().parents[2]
DEADLINE_S = 150.0
END_OF_TURN = 2

pytestmark = [pytest.mark.timeout(240), pytest.mark.whole_runs]


def attempt(*words: str, temporary: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "areal_async", "try", *words, "--config", "configs/gsm8k_cpu.yaml"],
        cwd=REPOSITORY,
        env=os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": str(REPOSITORY), "COLUMNS": "80"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def test_four_siblings_are_shown_with_their_rewards_and_nothing_is_left(tmp_path: Path) -> None:
    done = attempt("workflows/gsm8k.py", "--n", "4", temporary=tmp_path)

    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    titles = [line.rstrip(" ─") for line in lines if line.startswith("row 0 sibling")]
    assert [title.rpartition(" ")[0] for title in titles] == [f"row 0 sibling {number}: reward" for number in range(4)]
    rewards = [float(title.rpartition(" ")[2]) for title in titles]
    assert lines[-1].startswith(f"4 attempts: reward {sum(rewards) / 4:.3f}, std ")
    assert lines[-1].partition("; ")[2].startswith("4 scored, 0 failed, 0 rejected")
    assert sum("<|im_end|>" in line for line in lines if line.startswith("┃ ")) >= 1
    assert "\x1b" not in done.stdout
    assert max(map(len, lines[1:])) <= 80
    # a busy machine may have the loop run a second late, which is said
    assert [line for line in done.stderr.splitlines() if "loop.blocked" not in line] == []
    assert list(tmp_path.glob("areal-*")) == []


def test_json_of_a_running_server_has_the_tokens_that_the_server_gives(engine: Server, tmp_path: Path) -> None:
    url = str(engine.http.base_url)
    greedy = ("--rollout.sampling.temperature", "0")

    done = attempt(
        "workflows/gsm8k.py", "--server", url, "--json", "--prompts", "2", "--n", "2", *greedy, temporary=tmp_path
    )

    assert done.returncode == 0, done.stderr
    read: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(one["index"], one["sibling"], one["status"]) for one in read] == [
        (0, 0, "scored"), (0, 1, "scored"), (1, 0, "scored"), (1, 1, "scored")
    ]  # fmt: skip
    for one in read:
        (turn,), (sequence,) = one["turns"], one["sequences"]
        said = engine.generate(
            turn["prompt_ids"],
            temperature=0.0,
            max_new_tokens=32,
            ignore_eos=False,
            stop_token_ids=[END_OF_TURN],
        )
        assert turn["output_ids"] == said["output_ids"]
        logprobs = [entry[0] for entry in said["meta_info"]["output_token_logprobs"]]
        assert turn["logprobs"] == pytest.approx(logprobs, abs=1e-4), "computed in another batch: last digits differ"
        num_given, num_said = len(turn["prompt_ids"]), len(turn["output_ids"])
        assert sequence["token_ids"] == turn["prompt_ids"] + turn["output_ids"]
        assert sequence["loss_mask"] == [False] * num_given + [True] * num_said
        assert sequence["versions"] == [None] * num_given + ["0-0"] * num_said
        assert one["times"]["total_s"] >= one["times"]["model_s"] > 0
        assert one["row"]["question"]


BAD = """\
import asyncio
import itertools
import time

from areal_async import Policy, Prompt

number = itertools.count()


async def bad(prompt: Prompt, policy: Policy) -> float:
    kind = next(number)
    if kind == 0:
        return 1.0
    await policy.chat([{"role": "user", "content": prompt["question"]}])
    if kind == 1:
        await asyncio.sleep(3600)  # waits here
    if kind == 2:
        time.sleep(3600)  # stands here
    return "good" if kind == 3 else prompt["reply"]
"""


def test_every_way_to_fail_is_shown_with_its_cause_and_the_users_line(engine: Server, tmp_path: Path) -> None:
    file, temporary = tmp_path / "bad.py", tmp_path / "temporary"
    file.write_text(BAD)
    temporary.mkdir()

    done = attempt(
        str(file), "--n", "5", "--server", str(engine.http.base_url),
        "--rollout.loop_deadline_s", "5", "--rollout.episode_deadline_s", "15", temporary=temporary,
    )  # fmt: skip

    assert done.returncode == 1, done.stderr
    text = " ".join(done.stdout.split())
    for told in (
        "failed: workflow bad: returned without a call of the model",
        "failed: workflow bad: ran past rollout.episode_deadline_s = 15 s",
        "await asyncio.sleep(3600) # waits here",
        "failed: held up the event loop for rollout.loop_deadline_s = 5 s, at",
        "time.sleep(3600) # stands here",
        "failed: workflow bad: returned 'good', need a float",
        "row 0 has no column 'reply', its columns are question, answer",
        "5 attempts: 0 scored, 5 failed, 0 rejected",
    ):
        assert told in text
    assert "loop.blocked" in done.stderr
    assert list(temporary.glob("areal-*")) == []
