"""A run that trains adapters, with more tries after a wrong answer.

Servers get the adapters alone, and sample from the very policy that is trained. Each try is trained with its own
return, and the books balance.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.test_doctor import PROMISES, diagnose
from tests.e2e.test_run import REPOSITORY, Run, assert_accounts, assert_ran_well, said_by

pytestmark = [pytest.mark.timeout(240), pytest.mark.whole_runs]

BASE = REPOSITORY / "configs/models/tiny/model.safetensors"


def test_a_run_of_adapters_credits_each_try_sends_them_alone_exports_both_forms_and_is_evaluated_again(
    tmp_path: Path,
) -> None:
    # Without staleness every step's answers are of the adapter that the step before has announced.
    settings = {"rollout__max_staleness": 0, "trainer__lr": 1e-3, "algorithm__kl_coef": 0.01}
    config = "configs/multi_turn_math_cpu.yaml"
    run = Run(tmp_path, "lora", config=config, run__steps=3, trainer__lora__rank=4, **settings)

    ended = run.finish(workflow="workflows/multi_turn_math.py")

    assert ended.returncode == 0, ended.stdout
    assert_accounts(run, num_steps=3, max_staleness=0)
    assert_ran_well(run)
    verdicts = {ruling["promise"]: ruling["verdict"] for ruling in diagnose(run.directory, status=0)["rulings"]}
    assert verdicts == dict.fromkeys(PROMISES, "proved")
    assert all(0 < line["logprob_gap_mean"] < 1e-4 for line in run.lines)
    assert 0 < sum(line["reward_mean"] for line in run.lines) < 3, "the warm start can do it, and not well"
    assert run.lines[2]["kl_mean"] > 0, "answers differ from the base's"
    _check_tries(run)
    sent = [path for path in (run.directory / "weights").rglob("*") if path.is_file()]
    assert {path.name for path in sent} == {"adapter_config.json", "adapter_model.safetensors"}
    whole = run.directory / "model" / "model.safetensors"
    assert max(path.stat().st_size for path in sent) < whole.stat().st_size / 20
    base, model = load_file(BASE), load_file(whole)
    adapted = {name for name, tensor in base.items() if not torch.equal(tensor.float(), model[name])}
    config = json.loads((run.directory / "adapter" / "adapter_config.json").read_text())
    assert {name.removesuffix(".weight") for name in adapted} == set(config["target_modules"])

    evaluated = [json.loads(line) for line in (run.directory / "eval.jsonl").read_text().splitlines()]
    judged = said_by("eval", run.directory, "--version", "last", "--json")
    assert judged.returncode == 0, judged.stderr
    result = json.loads(judged.stdout)
    assert result["model"] == f"lora/{evaluated[-1]['eval_id']}", "its last checkpoint, merged"
    same = ("accuracy", "low", "high", "num_scored", "num_failed")
    assert [result[key] for key in same] == [evaluated[-1][key] for key in same]


def _check_tries(run: Run) -> None:
    assert all(line["failed"] == 0 and line["uncredited_tokens"] == 0 for line in run.lines)
    assert any(line["rollout/num_turns"] > 1 for line in run.lines)
    for row in run.trained:
        returns = [credit["reward"] for credit in row["credits"]]
        assert len(returns) == json.loads(row["info"])["rollout/num_turns"]
        assert returns == (
            [0.5 ** (len(returns) - 1 - place) for place in range(len(returns))] if returns[-1] else [0.0] * 3
        )
