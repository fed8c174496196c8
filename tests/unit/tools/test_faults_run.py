"""What is measured of a run is measured of all its processes, which carry its mark."""

import subprocess
import sys
from pathlib import Path

from areal_async.process.failpoints import FIRED
from tools.faults_run import FaultRun

BUSY_S = 0.5
BUSY = f"import sys, time\nwhile time.process_time() < {BUSY_S}: pass\nsys.stdin.read()"
"""Has used so much of a processor, however busy the machine is, and then waits to be seen."""


def test_processor_time_and_memory_are_those_of_processes_with_the_mark_alone(tmp_path: Path) -> None:
    ours, other = FaultRun(tmp_path, name="ours"), FaultRun(tmp_path, name="other")
    try:
        with subprocess.Popen([sys.executable, "-c", BUSY], env=ours.environment, stdin=subprocess.PIPE):
            ours.wait_until(lambda: ours.cpu_s > BUSY_S / 2, "what it has used")
    finally:
        ours.close()
        other.close()

    assert ours.cpu_s < 2 * BUSY_S
    assert ours.peak_rss_bytes > 1 << 20
    assert (other.cpu_s, other.peak_rss_bytes) == (0.0, 0)


def test_a_fault_that_struck_is_noted_outside_of_the_disk_whose_power_is_cut(tmp_path: Path) -> None:
    run = FaultRun(tmp_path / "disk", output=tmp_path / "run.out", faults="trainer.after_step:1:stop")

    Path(run.environment[FIRED], "trainer.after_step-1-stop").mkdir(parents=True)

    assert run.has_fired("trainer.after_step")
    assert not (tmp_path / "disk").exists()
