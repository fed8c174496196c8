"""Rows with a policy that sees: who stores images is killed, who trains them is, and their stream is full."""

import json
import signal
from typing import Any

from tools.faults_cases import Case, row
from tools.faults_run import ENDLESS, FaultRun, send_signal
from tools.make_tiny_vision import write_folder

NUM_ROWS = 64
SIDE = 256
"""Of an image of noise, in pixels: its PNG has some 200 kB, so a batch of 16 siblings has 3 MB."""
FULL_STEPS = 10
MAX_WAIT_S = 30.0
PLACEHOLDER = "the model has said token"
"""What a model that has learned nothing draws now and then; a group of which three did has failed by that alone."""
LOOKING = '''"""Shows each sibling noise of its own, and the group something that it has in common."""
import random

from PIL import Image

SIDE = {side}


def noise(side, seed):
    return Image.frombytes("RGB", (side, side), random.Random(seed).randbytes(3 * side * side))


async def looking(prompt, policy):
    parts = [{{"type": "image", "image": noise(64, prompt.index)}}]
    if SIDE:
        parts.append({{"type": "image", "image": noise(SIDE, random.random())}})
    reply = await policy.chat([{{"role": "user", "content": [*parts, {{"type": "text", "text": "What is it?"}}]}}])
    return float(sum(reply.token_ids) % 2)
'''


def _run_that_sees(case: Case, *, side: int = 0, **settings: Any) -> FaultRun:
    """Return a run with a tiny model that sees; ``side``: of an image that no two trajectories have in common."""
    workflow, rows = case.directory / "looking.py", case.directory / "rows.jsonl"
    workflow.write_text(LOOKING.format(side=side))
    rows.write_text("".join(json.dumps({"id": number}) + "\n" for number in range(NUM_ROWS)))
    model = write_folder(case.directory / "model", family="qwen3_vl")
    small = {"rollout__group_size": 4, "rollout__min_group_size": 2, "rollout__sampling__max_new_tokens": 8}
    return case.new_run(
        workflow=str(workflow), model__path=model, tasks__0__dataset__path=rows, **{**small, **settings}
    )


def _check_images(case: Case, run: FaultRun) -> None:
    """Fail the row unless what was trained agrees with the servers to float32: it is what they were shown."""
    worst = max(line["logprob_gap_mean"] for line in run.steps)
    case.check(worst < 1e-4, f"logprob_gap_mean: got {worst:g}, need at most 1e-4")
    reasons = {one["reason"] for one in run.events("node", "trajectory.failed") if PLACEHOLDER not in one["reason"]}
    case.check(not reasons, f"trajectories failed: {sorted(reasons)[:3]}")


@row("34", "images: a node killed between an image and its slot", is_random=True, is_quick=True)
def between_image_and_slot(case: Case) -> None:
    count = case.rng.randint(2, 30)
    run = _run_that_sees(case, side=64, faults=f"images.after_chunk:{count}:kill")
    case.note(f"killed at image no. {count}")
    run.start()
    run.wait_until(lambda: run.has_fired("images.after_chunk") or not run.is_alive, "the kill")
    case.recovered(run.wait_for_progress())
    run.finish()
    case.check_steps()
    _check_images(case, run)


@row("35", "images: the trainer killed while its batches show some", is_random=True)
def trainer_killed(case: Case) -> None:
    point = case.rng.choice(["trainer.before_step", "trainer.after_step", "trainer.before_acks"])
    run = _run_that_sees(case, side=64, faults=f"{point}:{case.rng.randint(2, 4)}:kill")
    case.note(f"killed at {point}")
    run.start()
    run.wait_until(lambda: run.has_fired(point) or not run.is_alive, f"{point} to strike")
    case.recovered(run.wait_for_progress())
    run.finish()
    case.check_steps()
    _check_images(case, run)


@row("36", "images: their stream full while the trainer is stopped")
def stream_full(case: Case) -> None:
    run = _run_that_sees(
        case, side=SIDE, run__steps=ENDLESS, rollout__max_staleness=4, rollout__max_image_stream_bytes=8 << 20,
        trainer__token_budget=1024,
    )  # fmt: skip
    run.start()
    run.wait_for_step(1)
    trainer = run.role_pid("trainer")
    send_signal(trainer, signal.SIGSTOP)
    run.wait_until(lambda: bool(run.events("node", "stream.full")), "the stream to fill")
    send_signal(trainer, signal.SIGCONT)
    case.recovered(run.wait_for_progress())
    run.wait_for_step(len(run.steps) + FULL_STEPS)
    waited_s = max(line["time_wait_data_s"] for line in run.steps[-FULL_STEPS:])
    case.check(waited_s < MAX_WAIT_S, f"a step waited {waited_s:.0f} s for data, need {MAX_WAIT_S:g}")
    run.stop()
    _check_images(case, run)
