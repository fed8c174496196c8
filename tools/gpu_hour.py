"""Find out in one command whether all that needs GPUs works on this machine: the first hour with one.

    python -m tools.gpu_hour --report gpu_hour.md
    python -m tools.gpu_hour --rehearse          # the same bodies on a CPU, over gloo: shows that they run, no more

Each step is a file of ``tests/gpu``, in an order that fails early: what the others stand on comes first, and where
such a step fails the rest is not run. A step that takes longer than its deadline is ended and has failed. Writes what
the machine is, and of each step its result, its seconds, its figures, or the reason why it was not run.
``GPU_HOUR_MODEL`` names the folder of a real model, ``NEED_SGLANG`` the interpreter of SGLang's environment.

Exits with 0 when all that this machine can run has passed, 1 when a step failed, 3 when it could run none.
"""

import argparse
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from areal_async.process.host import MIG, ask_driver, visible_gpus

ROOT = Path(__file__).parents[1]
PASS, FAIL, NOT_RUN = "pass", "FAIL", "not run"
NOTHING_RAN = 3
DEVICE = "GPU_HOUR_DEVICE"
"""Variable that has the tests run on ``cpu``."""
FIGURE = "figure: "
"""What a test begins a line with that belongs into the report."""
PACKAGES = ("torch", "transformers", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "triton", "sglang")
TAIL_LINES = 30
PASSED = re.compile(r"^=*\s*\d+ passed\b.* in [\d.]+s")
"""Pytest's last line, where anything has passed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A file of ``tests/gpu``."""

    name: str
    file: str
    deadline_s: float
    num_gpus: int = 1
    needs_sglang: bool = False
    is_ground: bool = False
    """Whether the steps after it stand on it."""

    def lack(self, *, num_gpus: int, has_sglang: bool) -> str:
        """Return what the machine lacks for it; empty when it can run."""
        if num_gpus < self.num_gpus:
            return f"needs {self.num_gpus} GPU{'s' * (self.num_gpus > 1)}, got {num_gpus}"
        return "needs SGLang's environment (NEED_SGLANG)" if self.needs_sglang and not has_sglang else ""


STEPS = (
    Step(name="each GPU computes", file="test_devices.py", deadline_s=120.0, is_ground=True),
    Step(name="attention as on a CPU", file="test_kernel.py", deadline_s=180.0, is_ground=True),
    Step(name="one rank learns as on a CPU", file="test_one_rank.py", deadline_s=420.0, is_ground=True),
    Step(name="two ranks away from device 0", file="test_two_ranks.py", num_gpus=2, deadline_s=420.0),
    Step(name="each layout learns as one CPU", file="test_all_layouts.py", num_gpus=2, deadline_s=900.0),
    Step(name="out of memory ends the crew", file="test_out_of_memory.py", num_gpus=2, deadline_s=300.0),
    Step(
        name="weights reach SGLang over nccl",
        file="test_weight_group.py",
        num_gpus=2,
        needs_sglang=True,
        deadline_s=600.0,
    ),
    Step(name="trainer and server agree", file="test_logprob_gap.py", needs_sglang=True, deadline_s=900.0),
    Step(name="one card for server and trainer", file="test_one_card.py", needs_sglang=True, deadline_s=900.0),
    Step(name="how much of a GPU is used", file="test_utilisation.py", deadline_s=600.0),
)


@dataclass(frozen=True, slots=True)
class Result:
    """What became of a step."""

    step: Step
    word: str
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    """Figures, reasons, and of a failed one the end of what it wrote."""


def main(given: Sequence[str] | None = None, *, steps: Sequence[Step] = STEPS) -> int:
    """Run the steps, print each as it ends, write the report, and return the exit status."""
    arguments = _parser().parse_args(given)
    num_gpus = max(step.num_gpus for step in steps) if arguments.rehearse else num_usable_gpus()
    results: list[Result] = []
    fallen = ""
    for step in steps:
        lack = step.lack(num_gpus=num_gpus, has_sglang=sglang_python() is not None)
        if fallen or lack:
            result = Result(step, NOT_RUN, notes=(f"not run: {fallen or lack}",))
        else:
            result = _run(step, rehearse=arguments.rehearse)
        if result.word == FAIL and step.is_ground:
            fallen = f"{step.name}: failed, and this stands on it"
        results.append(result)
        print(f"{result.word:8} {result.seconds:6.0f} s  {step.name}", *result.notes, sep="\n         ", flush=True)
    sentence = _verdict(results, rehearse=arguments.rehearse)
    if arguments.report is not None:
        arguments.report.write_text(_report(results, sentence), encoding="utf-8")
    print(sentence)
    return _status(results)


def num_usable_gpus() -> int:
    """Return how many GPUs a process can have at once: of MIG devices one, whichever it is given."""
    gpus = visible_gpus()
    return 1 if any(name.startswith(MIG) for name in gpus) else len(gpus)


def sglang_python() -> str | None:
    """Return the interpreter of SGLang's environment, if it is there."""
    return shutil.which(os.environ.get("NEED_SGLANG", str(ROOT / ".venv-sglang" / "bin" / "python")))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--report", type=Path, help="Markdown file that is written")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, over gloo")
    return parser


def _run(step: Step, *, rehearse: bool) -> Result:
    """Run a step in a session of its own, which ends with it."""
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-s", "-n", "0", "-m", "gpu", f"tests/gpu/{step.file}"]
    environment = {**os.environ, **({DEVICE: "cpu"} if rehearse else {})}
    started = time.monotonic()
    # A file, and no pipe: what a step leaves behind may hold that open for ever.
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as said:
        with subprocess.Popen(
            command, cwd=ROOT, env=environment, start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT,
        ) as process:  # fmt: skip
            status: int | None = None
            try:
                status = process.wait(step.deadline_s)
            except subprocess.TimeoutExpired:
                pass
            finally:
                if process.returncode is None:  # late, or interrupted as the step in its session is not
                    os.killpg(process.pid, signal.SIGKILL)
        said.seek(0)
        output = said.read()
    return judge(step, status, output, time.monotonic() - started)


def judge(step: Step, status: int | None, output: str, seconds: float) -> Result:
    """Say what became of a step that wrote ``output``; ``status``: pytest's, None where its deadline ended it."""
    lines = output.splitlines()
    figures = [line.removeprefix(FIGURE).strip() for line in lines if line.startswith(FIGURE)]
    skipped = [line[line.index("not run: ") :] for line in lines if line.startswith("SKIPPED") and "not run: " in line]
    if status == 0:
        # What a process of it says as it ends may come behind pytest's last line.
        has_passed = any(PASSED.search(line) for line in lines)
        return Result(step, PASS if has_passed else NOT_RUN, seconds, (*figures, *skipped))
    why = f"longer than {step.deadline_s:g} s" if status is None else f"pytest ended with {status}"
    return Result(step, FAIL, seconds, (*figures, why, *lines[-TAIL_LINES:]))


def _status(results: Sequence[Result]) -> int:
    words = {result.word for result in results}
    return 1 if FAIL in words else 0 if PASS in words else NOTHING_RAN


def _verdict(results: Sequence[Result], *, rehearse: bool) -> str:
    counts = {word: sum(result.word == word for result in results) for word in (PASS, FAIL, NOT_RUN)}
    said = ", ".join(f"{count} {word}" for word, count in counts.items())
    if _status(results) == NOTHING_RAN:
        return f"gpu hour: {said}: this machine can run none of it"
    return f"gpu hour: {said}" + (" in a rehearsal on a CPU, which says nothing of GPUs" if rehearse else "")


def _report(results: Sequence[Result], sentence: str) -> str:
    gpus = ask_driver("--query-gpu=index,name,memory.total,driver_version", "--format=csv,noheader").splitlines()
    lines = ["# GPU hour", "", sentence + ".", "", f"Machine: {platform.node()}, {platform.platform()}."]
    lines += [f"GPU {gpu}" for gpu in gpus] or ["No GPU that the driver knows."]
    lines += ["", "Versions: " + ", ".join(f"{name} {found}" for name, found in _versions().items()) + ".", ""]
    lines += ["| step | result | seconds |", "|---|---|---|"]
    lines += [f"| {result.step.name} | {result.word} | {result.seconds:.0f} |" for result in results]
    for result in results:
        if result.notes:
            lines += ["", f"## {result.step.name}: {result.word}", "", "```", *result.notes, "```"]
    return "\n".join(lines) + "\n"


def _versions() -> dict[str, str]:
    """Return the versions of what decides, here and, with ``sglang:`` before it, in SGLang's environment."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    python = sglang_python()
    if python is not None:
        told = "import importlib.metadata as m\nfor d in m.distributions(): print(d.name, d.version)"
        listed = subprocess.run([python, "-c", told], capture_output=True, text=True, timeout=60.0, check=False).stdout
        pairs = (line.partition(" ") for line in listed.splitlines())
        found |= {f"sglang:{name}": number for name, _, number in pairs if name in PACKAGES}
    return found


if __name__ == "__main__":
    sys.exit(main())
