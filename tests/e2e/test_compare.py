"""``compare`` asks two sides for the same rows: what is worse is rejected, what was answered is not asked for again."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_async.process.json_lines import read_json_lines
from tests.e2e.test_run import REPOSITORY, Run, collect, said, said_by, wait_until
from tests.unit.inference.embedded_engine import Server

MODEL = REPOSITORY / "configs" / "models" / "tiny"
GSM8K = str(REPOSITORY / "workflows" / "gsm8k.py")
CONFIG = ["--config", str(REPOSITORY / "configs" / "gsm8k_cpu.yaml")]

pytestmark = [pytest.mark.timeout(600), pytest.mark.whole_runs]


def noisy(tensor: Any, scale: float) -> Any:
    import torch

    return tensor + scale * tensor.std() * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def worse(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The tiny model with noise on every matrix."""
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("noisy") / "tiny"
    shutil.copytree(MODEL, folder)
    for file in folder.glob("*.safetensors"):
        weights = {name: noisy(one, 0.5) if one.dim() > 1 else one for name, one in load_file(file).items()}
        save_file(weights, file, metadata={"format": "pt"})
    server = Server(folder)
    yield server
    server.close()


def url(server: Server) -> str:
    return str(server.http.base_url)


def test_a_model_made_worse_by_noise_is_rejected_and_the_better_one_accepted(
    engine: Server, worse: Server, tmp_path: Path
) -> None:
    def compare(a: Server, b: Server, *words: str) -> Any:
        sides = ["--servers", f"{url(a)},{url(b)}", "--limit", "48"]
        return said("compare", GSM8K, *CONFIG, *sides, "--at-least", "0", *words)

    rejected = compare(engine, worse, "--output", str(tmp_path / "rejected"))
    accepted = compare(worse, engine, "--output", str(tmp_path / "accepted"), "--json")

    assert rejected.returncode == 1, rejected.stdout + rejected.stderr
    assert f"rejected: {url(worse)}, low end -0." in rejected.stdout
    assert accepted.returncode == 0, accepted.stdout + accepted.stderr
    told = json.loads(accepted.stdout)
    assert told["overall"]["low"] > 0
    assert told["overall"]["mcnemar_p"] < 0.01
    assert told["rows"] == {"gsm8k": 48}
    page = (tmp_path / "accepted" / "comparison.html").read_text()
    assert page.count("<details>") == told["overall"]["wins"] + told["overall"]["losses"]
    assert "question: " in page
    lost = [one for one in read_json_lines(tmp_path / "rejected" / "answers.jsonl") if one["side"] == "b"]
    assert sum(one["reward"] for one in lost) / 48 == told["overall"]["a"]["accuracy"], "greedy: the same each time"


def test_the_same_command_asks_only_for_what_is_missing_after_a_kill(engine: Server, tmp_path: Path) -> None:
    """Each answer is drawn by a seed of its own: what is asked for later is what would have been answered before."""
    words = [GSM8K, *CONFIG, "--servers", url(engine), "--limit", "32", "--samples", "4", "--json",
             "--b", "rollout.sampling.max_new_tokens=12", "--rollout.max_trajectories_per_node"]  # fmt: skip
    num_answers = 2 * 32 * 4
    file = tmp_path / "killed" / "answers.jsonl"
    command = [sys.executable, "-m", "areal_async", "compare", *words, "2", "--output", str(file.parent)]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL) as process:
        wait_until(
            lambda: len(read_json_lines(file)) > num_answers / 2 + 5 or process.poll() is not None,
            "some answers of the second side",
        )
        assert process.poll() is None
        os.kill(process.pid, signal.SIGKILL)
    before = read_json_lines(file)
    assert len(before) < num_answers, "it was over before it was killed"

    again = said("compare", *words, "16", "--output", str(file.parent))
    whole = said("compare", *words, "16", "--output", str(tmp_path / "whole"))

    assert again.returncode == whole.returncode == 0, again.stderr + whole.stderr
    after = read_json_lines(file)
    assert after[: len(before)] == before
    told, expected = (texts(lines) for lines in (after, read_json_lines(tmp_path / "whole" / "answers.jsonl")))
    assert len(told) == len(after) == num_answers
    num_same = sum(told[one] == text for one, text in expected.items())
    assert num_same > 0.95 * num_answers, "all but some whose draw is next to a bound, by how a batch is rounded"
    assert len(set(told.values())) > num_answers / 4, "they are drawn"
    overall = json.loads(again.stdout)["overall"]
    assert overall["difference"] < 0, "many an answer is cut off"
    assert overall["b"]["num_tokens_mean"] <= 12 < overall["a"]["num_tokens_mean"]
    assert said("compare", *words, "16", "--output", str(file.parent)).stdout == again.stdout
    assert read_json_lines(file) == after, "nothing is asked again of what is whole"


def texts(lines: list[dict[str, Any]]) -> dict[Any, str]:
    return {(one["side"], one["row"], one["sample"]): one["text"] for one in lines}


def test_what_fails_is_an_error_and_no_reward_of_0(engine: Server, tmp_path: Path) -> None:
    """Every third row fails, whatever the model says."""
    (tmp_path / "half.py").write_text(
        "from workflows.gsm8k import gsm8k\n\n\n"
        "async def half(prompt, policy):\n"
        "    score = await gsm8k(prompt, policy)\n"
        "    if prompt.index % 3 == 0:\n"
        "        raise RuntimeError('no reward today')\n"
        "    return score\n"
    )
    words = [str(tmp_path / "half.py"), *CONFIG, "--servers", url(engine), "--limit", "12",
             "--b", "rollout.sampling.max_new_tokens=8", "--output", str(tmp_path / "out"), "--json"]  # fmt: skip

    done = said("compare", *words)

    assert done.returncode == 0, done.stderr
    overall = json.loads(done.stdout)["overall"]
    assert (overall["num_rows"], overall["num_left_out"]) == (8, 4)
    assert [overall[side]["num_failed"] for side in ("a", "b")] == [4, 4]
    assert list(overall["a"]["reasons"].values()) == [4]


@pytest.mark.nightly
def test_of_a_real_run_a_later_checkpoint_is_accepted_and_one_made_worse_by_noise_rejected(tmp_path: Path) -> None:
    run = Run(tmp_path, "learns", run__steps=24, trainer__keep_checkpoints=9, trainer__checkpoint_every_steps=8)
    ended = run.finish("--rollout.batch_groups", "16")
    assert ended.returncode == 0, ended.stdout
    worsen(run.directory / "checkpoints" / "1-24", run.directory / "checkpoints" / "2-24")
    words = ["--at-least", "0", "--eval.limit", "256"]

    accepted = said_by("compare", run.directory, "--versions", "1-8,1-24", *words)
    rejected = said_by("compare", run.directory, "--versions", "1-24,2-24", *words)

    print(accepted.stdout, rejected.stdout)
    assert accepted.returncode == 0, accepted.stdout + accepted.stderr
    assert rejected.returncode == 1, rejected.stdout + rejected.stderr
    assert "accepted: 1-24, low end +0." in accepted.stdout
    assert "rejected: 2-24, low end -0." in rejected.stdout
    folders = [path.name.rpartition("_")[0] for path in (run.directory / "comparisons").iterdir()]
    assert sorted(folders) == ["1-24_2-24", "1-8_1-24"]
    assert said_by("promote", run.directory, "2-24").returncode == 2
    promoted = said_by("promote", run.directory, "1-24")
    assert promoted.returncode == 0, promoted.stderr


@pytest.mark.nightly
def test_nodes_of_a_live_run_answer_beside_training_and_go_on_after_whoever_asked_was_ended(tmp_path: Path) -> None:
    run = Run(tmp_path, "live", run__steps=400, trainer__keep_checkpoints=200, eval__share=1.0)
    words = ["--versions", "1-2,1-4", "--limit", "16", "--samples", "2", "--json"]
    command = [sys.executable, "-m", "areal_async", "compare", "--run", str(run.directory), *words]

    def answers() -> list[dict[str, Any]]:
        return [one for path in run.directory.glob("comparisons/*/answers.jsonl") for one in read_json_lines(path)]

    with run.start() as process:
        run.wait_for_step(5, process)
        with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.DEVNULL) as asking:
            wait_until(lambda: len(answers()) > 4 or asking.poll() is not None, "some answers of the first side")
            asking.send_signal(signal.SIGTERM)  # as Ctrl-C, which a shell may have all below it ignore
        before = answers()
        is_left = any((run.directory / "arms").iterdir())
        again = said_by("compare", run.directory, *words)
        assert said_by("stop", run.directory).returncode == 0
        ended = collect(process)

    assert asking.returncode == 130
    assert 4 < len(before) < 64
    assert not is_left, "its model goes with it"
    assert again.returncode == 0, again.stderr
    assert "1-4 is written for the nodes of run live" in again.stderr
    assert len(texts(answers())) == len(answers()) == 64
    assert answers()[: len(before)] == before
    overall = json.loads(again.stdout)["overall"]
    assert (overall["num_rows"], overall["a"]["num_failed"], overall["b"]["num_failed"]) == (16, 0, 0)
    assert ended.returncode == 0, ended.stdout
    assert not any("compare" in str(row["sample_uid"]) for row in run.trained)
    doctor = said_by("doctor", run.directory)
    assert doctor.returncode == 0, doctor.stdout


def worsen(checkpoint: Path, into: Path) -> None:
    """Write a checkpoint again with noise on the matrices of its model."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save, torch_save_to_dcp

    shutil.copytree(checkpoint, into)
    (into / "SHA256SUMS").unlink()
    shutil.rmtree(into / "state")
    dcp_to_torch_save(checkpoint / "state", into / "whole.pt")
    state = torch.load(into / "whole.pt", weights_only=False)
    matrices = {name: one for name, one in state.items() if name.startswith("parameters.") and one.dim() > 1}
    state |= {name: noisy(one, 0.3) for name, one in matrices.items()}
    torch.save(state, into / "whole.pt")
    torch_save_to_dcp(into / "whole.pt", into / "state")
    (into / "whole.pt").unlink()
