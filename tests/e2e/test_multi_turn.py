"""A whole run with more tries after a wrong answer: each is trained with its own return, and the books balance."""

import json
from pathlib import Path

import pytest

from tests.e2e.test_doctor import PROMISES, diagnose
from tests.e2e.test_run import Run

pytestmark = [pytest.mark.timeout(300), pytest.mark.whole_runs]


def test_tries_are_credited_one_by_one(tmp_path: Path) -> None:
    run = Run(tmp_path, "multi-turn", config="configs/multi_turn_math_cpu.yaml", run__steps=2)

    done = run.finish(workflow="workflows/multi_turn_math.py")

    assert done.returncode == 0, done.stdout
    assert [line["step"] for line in run.lines] == [1, 2]
    assert all(line["failed"] == 0 and line["uncredited_tokens"] == 0 for line in run.lines)
    assert any(line["info/num_turns"] > 1 for line in run.lines)
    for row in run.trained:
        returns = [credit["reward"] for credit in row["credits"]]
        assert len(returns) == json.loads(row["info"])["num_turns"]
        assert returns == (
            [0.5 ** (len(returns) - 1 - place) for place in range(len(returns))] if returns[-1] else [0.0] * 3
        )
    rulings = {one["promise"]: one["verdict"] for one in diagnose(run.directory, status=0)["rulings"]}
    assert rulings == dict.fromkeys(PROMISES, "proved")
