"""A report with everything in it, of a run that never was."""

import math
from datetime import UTC, datetime
from typing import Any

from areal_async.monitor.report.data import ReportData, ReportTrajectory
from areal_async.monitor.token_views import TokenKind, TokenView
from areal_async.monitor.trajectory_list import TRAINED, Entry

STEPS = 130
HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"


def line(step: int) -> dict[str, Any]:
    """Return a step's line; the loss of one is no number, and the times of another are large."""
    return {
        "step": step,
        "weights_version": f"1-{step}",
        "reward_mean": 1 - math.exp(-step / 40),
        "reward/first": 0.5,
        "reward/second": step / 200,
        "num_groups": 4,
        "num_trajectories": 32,
        "num_tokens": 123_456 + step,
        "staleness_mean": 1.5,
        "staleness_max": 2,
        "output_tokens_mean": 812.5,
        "truncated_share": 0.25,
        "loss": math.nan if step == 50 else -0.001 * step,
        "grad_norm": 1e-7 * step,
        "entropy_mean": 2.0,
        "logprob_gap_all_mean": 0.01,
        "clip_fraction": 0.0,
        "kl_mean": 0.1 * step,
        "lr": 1e-6,
        "dropped_stale": 1,
        "failed": 0,
        "time_step_s": 90.0 if step == 7 else 12.0,
        "time_wait_data_s": 2.0,
        "time_train_s": 9.0,
        "time_weights_s": 0.5,
    }


def entry(reward: float, *, sibling: int = 0) -> Entry:
    """Return the facts of a trained trajectory."""
    return Entry(
        id=f"0-17-0.{sibling}", state=TRAINED, step=130, group="0-17-0", sibling=sibling, workflow="w", reward=reward,
        advantage=-0.5, tokens=4, output_tokens=3, turns=1, oldest="1-127", newest="1-129", error="", truncated=1,
        near_step=130,
    )  # fmt: skip


def report(*, num_steps: int = STEPS, text: str = HOSTILE) -> ReportData:
    """Return what a report tells of so many steps."""
    views = [
        TokenView(f"{text}\nask: " + "long " * 60, TokenKind.GIVEN, 0.0, "", False),
        TokenView("sure", TokenKind.TRAINED, -0.01, "1-127", True),
        TokenView("unlikely", TokenKind.TRAINED, -6.0, "1-129", True),
        TokenView("stale" * 40, TokenKind.MASKED, -0.5, "1-129", False),
    ]
    return ReportData(
        run="a-run-with-a-rather-long-name-of-48-characters--",
        written_at=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
        steps=200,
        lines=[line(step) for step in range(1, num_steps + 1)],
        evaluations=[{"step": step, "accuracy": step / 200} for step in range(0, num_steps + 1, 20)],
        tags={"champion": "1-100"},
        checkpoints_s=dict.fromkeys(range(10, num_steps, 10), 1.5),
        ages={0: 100, 1: 200, 2: 700},
        aged_steps=(111, 130),
        samples=[
            ReportTrajectory(what, entry(place, sibling=place), [views])
            for place, what in enumerate(("lowest", "median", "highest"))
        ],
        outcomes=[("trained", 520), ("stale", 130), ("failed", 12), ("rejected", 3), ("abandoned", 2)],
        reasons=[(f"failed: RewardError: {text}", 12), ("rejected: no tools were called", 3)],
        settings=f"run:\n  name: {text}\n" + "x" * 300,
        versions={"areal_async": "0.1.0"},
    )
