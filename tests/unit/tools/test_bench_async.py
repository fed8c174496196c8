"""What overlapping is worth is told beside where its time went; when both run, each has the cores it is measured on."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tools.bench_async import give_trainer, parts, per_token


def test_a_steps_time_is_told_by_what_it_went_to() -> None:
    lines = [
        {"num_tokens": 100, "time_step_s": 2.0, "time_wait_data_s": 0.5, "time_train_s": 1.4, "time_weights_s": 0.1,
         "time_checkpoint_s": 0.0},
        {"num_tokens": 300, "time_step_s": 2.0, "time_wait_data_s": 0.3, "time_train_s": 1.6, "time_weights_s": 0.1,
         "time_checkpoint_s": 0.0},
    ]  # fmt: skip
    assert per_token(lines) == pytest.approx(0.01)
    assert parts(lines) == "waits for data 20%, trains 75%, hands over 5%, checkpoints 0%"


def test_the_trainer_alone_gets_other_cores_than_its_starter(tmp_path: Path) -> None:
    have = os.sched_getaffinity(0)
    if len(have) < 2:
        pytest.skip("one core: there is nothing to divide")
    few = {min(have)}
    program = "import sys, time; print('up', flush=True); time.sleep(60)"
    roles = {
        role: subprocess.Popen(
            [sys.executable, "-c", program, role, "--run-directory", str(tmp_path / "bench")],
            stdout=subprocess.PIPE,
            preexec_fn=lambda: os.sched_setaffinity(0, few),
        )
        for role in ("node", "trainer")
    }
    try:
        for process in roles.values():
            assert process.stdout is not None
            process.stdout.readline()
        assert not give_trainer(str(tmp_path / "another"), have), "the trainer of another run"
        assert give_trainer(str(tmp_path), have)
        assert os.sched_getaffinity(roles["trainer"].pid) == have
        assert os.sched_getaffinity(roles["node"].pid) == few
    finally:
        for process in roles.values():
            process.kill()
            process.communicate()
