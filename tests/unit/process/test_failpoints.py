"""A fault strikes exactly where and when it was asked to, once, and never without being asked."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from areal_async.errors import PipelineError
from areal_async.process.failpoints import FIRED, SPECIFICATION, FaultPoints, parse_faults


def test_a_fault_strikes_at_its_occurrence_and_once_for_all_processes(tmp_path: Path) -> None:
    environment = {SPECIFICATION: "trainer.after_step:2:raise", FIRED: str(tmp_path / "fired")}
    first, second = FaultPoints(environment), FaultPoints(environment)

    first.reach("trainer.after_step")
    first.reach("trainer.before_step")
    with pytest.raises(PipelineError, match="trainer.after_step"):
        first.reach("trainer.after_step")

    for _ in range(3):
        second.reach("trainer.after_step")
    assert [path.name for path in (tmp_path / "fired").iterdir()] == ["trainer.after_step-2-raise"]


def test_nothing_happens_and_nothing_is_written_unasked(tmp_path: Path) -> None:
    points = FaultPoints({FIRED: str(tmp_path / "fired")})

    points.reach("trainer.after_step")

    assert not (tmp_path / "fired").exists()


def test_a_killed_process_ends_at_its_point(tmp_path: Path) -> None:
    program = (
        "from areal_async.process.failpoints import failpoint as f; f('a.b'); print('one'); f('a.b'); print('two')"
    )

    ended = subprocess.run(
        [sys.executable, "-u", "-c", program],
        env={SPECIFICATION: "a.b:2:kill", FIRED: str(tmp_path)},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (ended.returncode, ended.stdout) == (-signal.SIGKILL, "one\n")


@pytest.mark.parametrize("text", ["a.b", "a.b:x:kill", "a.b:1:sleep"])
def test_an_entry_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="got|values"):
        parse_faults(text)
