"""What is measured of a run is measured of all its processes, which carry its mark."""

import subprocess
import sys
from pathlib import Path

from tools.faults_run import FaultRun

BUSY = "import time\nends_at = time.monotonic() + 2\nwhile time.monotonic() < ends_at: pass"


def test_processor_time_and_memory_are_those_of_processes_with_the_mark_alone(tmp_path: Path) -> None:
    ours, other = FaultRun(tmp_path, name="ours"), FaultRun(tmp_path, name="other")
    try:
        subprocess.run([sys.executable, "-c", BUSY], env=ours.environment, check=True)
    finally:
        ours.close()
        other.close()

    assert 0.2 < ours.cpu_s < 2.5
    assert ours.peak_rss_bytes > 1 << 20
    assert (other.cpu_s, other.peak_rss_bytes) == (0.0, 0)
