"""The trainer's use of a GPU is measured, and is more than nothing."""

from tests.gpu.machine import DEVICE, report, run_tool

ON_A_GPU = ("--models", "0.6B", "--tokens", "4096", "16384", "--rounds", "3")
ON_A_CPU = ("--models", "tiny", "--tokens", "64", "--rounds", "1", "--dtype", "float32")


def test_the_share_of_a_gpus_peak_that_training_uses_is_measured() -> None:
    words = ON_A_GPU if DEVICE == "cuda" else ON_A_CPU

    told = run_tool("tools.bench_mfu", *words, deadline_s=500.0)

    lines = [line for line in told.splitlines() if line.startswith(("model", words[1]))]
    for line in lines:
        report(line)
    assert len(lines) > 1
    assert "out of memory" not in told
