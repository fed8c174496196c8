"""The benchmark of a step times what a trainer really calls."""

import subprocess
import sys

import pytest

from tools.bench_step import PARTS


@pytest.mark.timeout(180)
def test_each_part_that_is_timed_is_called() -> None:
    words = [sys.executable, "-m", "tools.bench_step", "--steps", "8", "--rounds", "1", "--device-s", "0"]
    done = subprocess.run([*words, "--tokens", "50"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert [part for part in PARTS if f"\n  {part} " not in done.stdout] == []
