"""Does any process grow with its steps? One long run of small steps, and the memory of each process by step.

    python -m tools.bench_growth                      # 6,000 steps, about half an hour on two cores
    python -m tools.bench_growth --steps 1500 --after 500
    python -m tools.bench_growth --minutes 20         # as many of them as there is time for
    python -m tools.bench_growth --images 256 --steps 1500 --after 500

With ``--images`` the policy sees: each row has an image of noise with so many pixels a side (256: 200 kB as a PNG), and
each answer shows another one of its own. Their stream is so small that it fills now and then, and held-out rows are
evaluated meanwhile.

Memory is what a process has for itself alone and what is anonymous (``Private_Dirty`` of ``smaps_rollup``): files that
are mapped or cached do not count, nor does what is done once after the last step (the plots, the export). Prints a row
per process: bytes per step over the steps after ``--after``, the 95 % interval of the slope (blocks of samples drawn
anew, so that neighbours which move together count as one), the size at the end, and what each file of the run directory
takes per step. Exits with 1 when a process grows by more than ``--most`` bytes per step, the lower end of its interval
included.
"""

import argparse
import io
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
from PIL import Image

from tools.kill_again import descendants

POLL_S = 2.0
NUM_RESAMPLES = 2_000
BLOCK = 20
"""Neighbouring samples that are drawn together."""
SMALL = [
    "--rollout.batch_groups", "2", "--rollout.group_size", "2", "--rollout.min_group_size", "1",
    "--rollout.sampling.max_new_tokens", "4", "--eval.every_steps", "0", "--eval.limit", "1",
    "--trainer.checkpoint_every_steps", "50",
]  # fmt: skip
"""Four answers of four tokens a step: what is kept per step shows, and what a batch takes does not."""
NUM_ROWS = 64
LOOKING = """import random

from PIL import Image


async def looking(prompt, policy):
    own = Image.frombytes("RGB", ({side}, {side}), random.randbytes(3 * {side} * {side}))
    parts = [{{"type": "image", "image": image}} for image in (prompt["image"], own)]
    reply = await policy.chat([{{"role": "user", "content": [*parts, {{"type": "text", "text": "Same?"}}]}}])
    return float(sum(reply.token_ids) % 2)
"""

Samples = dict[str, list[tuple[int, int]]]
"""Process -> (training step, bytes) in the order of time."""


def main() -> int:
    """Run, watch, and say who grows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6_000, help="training steps in all")
    parser.add_argument("--after", type=int, default=1_000, help="steps that do not count: caches fill")
    parser.add_argument("--most", type=float, default=1_000.0, help="bytes per step that a process may grow by")
    parser.add_argument("--minutes", type=float, default=math.inf, help="stop the run then, and judge what there was")
    parser.add_argument("--images", type=int, default=0, metavar="SIDE", help="show images of so many pixels a side")
    parser.add_argument("--directory", type=Path, default=Path("runs"), help="where the run is made")
    arguments, overrides = parser.parse_known_args()
    directory = arguments.directory / "growth"
    workflow = "workflows/gsm8k.py"
    if arguments.images:
        workflow, shows = write_images(arguments.directory / "growth_images", arguments.images)
        overrides = [*shows, *overrides]
    command = [
        sys.executable, "-m", "areal_async", "run", workflow, "--config", "configs/gsm8k_cpu.yaml",
        "--fresh", "--no-display", "--run.name", "growth", "--run.directory", str(arguments.directory),
        "--run.steps", str(arguments.steps), *SMALL, *overrides,
    ]  # fmt: skip
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        samples, was_stopped = watch(process, directory / "metrics.jsonl", within_s=60 * arguments.minutes)
    if process.returncode and not was_stopped:
        print(f"the run ended with status {process.returncode}: see {directory / 'logs'}")
        return 1
    num_steps = num_lines(directory / "metrics.jsonl")
    counted = range(arguments.after + 1, num_steps)
    print(f"{num_steps} steps, of which those from {counted.start} on count")
    grows = [name for name, points in sorted(samples.items()) if judge(name, points, counted, arguments.most)]
    for path in sorted(directory.iterdir()):
        size = sum(file.stat().st_size for file in [path, *path.rglob("*")] if file.is_file())
        print(f"{path.name:16} {size / max(num_steps, 1):10,.0f} bytes of disk per step")
    print(f"grow by more than {arguments.most:,.0f} bytes per step: {', '.join(grows) or 'none'}")
    return 1 if grows else 0


def write_images(folder: Path, side: int) -> tuple[str, list[str]]:
    """Write a model that sees, rows with noise and a workflow that shows it; return the workflow and the settings."""
    import datasets

    folder.mkdir(parents=True, exist_ok=True)
    make_model = [sys.executable, "-m", "tools.make_tiny_vision", str(folder / "model")]
    subprocess.run(make_model, check=True, stdin=subprocess.DEVNULL)  # apart: no torch beside what is measured
    noise = [png_of_noise(side, seed) for seed in range(NUM_ROWS)]
    features = datasets.Features({"image": datasets.Image()})
    datasets.Dataset.from_dict({"image": noise}, features=features).to_parquet(folder / "rows.parquet")
    (folder / "looking.py").write_text(LOOKING.format(side=side))
    return str(folder / "looking.py"), [
        "--model.path", str(folder / "model"), "--tasks.0.dataset.path", str(folder / "rows.parquet"),
        "--eval.dataset.path", str(folder / "rows.parquet"), "--eval.every_steps", "20", "--eval.limit", "8",
        "--trainer.checkpoint_every_steps", "10", "--rollout.max_image_stream_bytes", str(60 * 3 * side**2),
    ]  # fmt: skip


def png_of_noise(side: int, seed: int) -> bytes:
    """Return an image that no PNG is shorter than."""
    buffer = io.BytesIO()
    Image.frombytes("RGB", (side, side), random.Random(seed).randbytes(3 * side**2)).save(buffer, "PNG")
    return buffer.getvalue()


def watch(process: subprocess.Popen[bytes], metrics: Path, *, within_s: float) -> tuple[Samples, bool]:
    """Sample every process of the run until it ends, or has to be stopped: say whether it had."""
    samples: Samples = defaultdict(list)
    ends_at_s = time.monotonic() + within_s
    while process.poll() is None:
        if time.monotonic() > ends_at_s:
            process.send_signal(signal.SIGINT)
            process.wait()
            return samples, True
        step = num_lines(metrics)
        for pid in [process.pid, *descendants(process.pid)]:
            name, size = name_of(pid), private_bytes(pid)
            if name and size:
                samples[name].append((step, size))
        time.sleep(POLL_S)
    return samples, False


def num_lines(path: Path) -> int:
    """Return the newest step; 0 before the first."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - (64 << 10)))
            lines = file.read().splitlines()
    except FileNotFoundError:
        return 0
    for line in reversed(lines):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError):
            continue
    return 0


def name_of(pid: int) -> str:
    """Return which process of a run it is; empty for what comes and goes (workers, sandboxes)."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return ""
    if Path(words[0]).name == "nats-server":
        return "broker"
    if "areal_async.inference.embedded" in words:
        return f"server of {Path(words[words.index('--model-path') + 1]).name}"
    if "areal_async" in words:
        verb = words[words.index("areal_async") + 1]
        return {"run": "launcher", "trainer": "trainer", "node": "node", "controller": "controller"}.get(verb, "")
    return ""


def private_bytes(pid: int) -> int:
    """Return a process's own anonymous memory; 0 when it has gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    kilobytes = {line.split(":")[0]: line.split()[1] for line in lines[1:]}
    return int(kilobytes["Private_Dirty"]) << 10


def judge(name: str, points: list[tuple[int, int]], counted: range, most: float) -> bool:
    """Print a process's row over the steps that are ``counted``; say whether it certainly grows by more than it may."""
    late = np.array([point for point in points if point[0] in counted], dtype=float)
    if len(late) < 3 * BLOCK:
        print(f"{name:16}  {len(late)} samples from step {counted.start} on: too few to say")
        return False
    slope = slope_of(late)
    low, high = np.percentile(resampled(late), [2.5, 97.5])
    print(f"{name:16} {slope:9,.0f} bytes per step ({low:,.0f} to {high:,.0f}), {late[-1, 1] / 1e6:,.0f} MB at the end")
    return bool(low > most)


def slope_of(points: "np.ndarray") -> float:
    """Return bytes per step by least squares."""
    return float(np.polyfit(points[:, 0], points[:, 1], 1)[0])


def resampled(points: "np.ndarray") -> list[float]:
    """Return the slopes of as many samples as there are, drawn in blocks (moving block bootstrap, Kuensch 1989)."""
    chance = np.random.default_rng(1)
    starts = np.arange(len(points) - BLOCK + 1)
    num_blocks = -(-len(points) // BLOCK)
    drawn = (chance.choice(starts, num_blocks)[:, None] + np.arange(BLOCK) for _ in range(NUM_RESAMPLES))
    return [slope_of(points[np.minimum(index.ravel(), len(points) - 1)]) for index in drawn]


if __name__ == "__main__":
    sys.exit(main())
