"""Layouts on GPUs beside one rank on the CPU, by ``tools/compare_layouts.py``."""

from pathlib import Path

from tests.gpu.machine import report, run_tool
from tools.gpu_hour import STEPS

TOLERANCES = {"float32": 1e-2, "bfloat16": 0.15}
"""Relative, of any parameter's gradient, in float32 of its change too.

Of two ranks on a CPU beside one: 2e-4 in float32, where Adam makes much of the smallest differences, 0.065 in bfloat16.
"""
DEADLINE_S = max(step.deadline_s for step in STEPS)


def hold_against_a_cpu(layouts: str, dtype: str, directory: Path) -> None:
    """Train a step in each of the layouts on the GPUs, and hold its gradients against those of a CPU in float32."""
    kept = ["--batch", str(directory / "batch"), "--reference", str(directory / "reference"), "--steps", "1"]
    kept += ["--sequences", "12"]
    run_tool("tools.compare_layouts", *kept, "--layouts", "", deadline_s=DEADLINE_S, on_cpu=True)
    tolerance = str(TOLERANCES[dtype])
    told = run_tool(
        "tools.compare_layouts", *kept, "--layouts", layouts, "--dtype", dtype, "--tolerance", tolerance,
        deadline_s=DEADLINE_S,
    )  # fmt: skip
    for line in told.splitlines():
        if line.startswith("policy"):
            report(f"{dtype}, model, layout, ranks, gradients, changes, largest of: {line}")
