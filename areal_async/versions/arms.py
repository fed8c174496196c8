"""What an arm has come to: in words, from its summary as ``arms.jsonl`` keeps it, and as a comparison."""

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from areal_async.protocol.arms import Arm, Arms, ArmState
from areal_async.versions.comparison import Compared, Comparison, Scores, Side

FOLDER = "arms"
"""In a run's directory: models of its own versions that nodes serve beside the newest."""
FILE = "arms.jsonl"
"""In a run's directory: a line for each arm, now and then."""


def remove_unserved(run_directory: Path, arms: Arms) -> None:
    """Delete the models that were written for nodes and that nobody is to serve: whoever wrote them was killed."""
    served = {Path(arm.path).name for arm in arms.by_name.values()}
    with suppress(FileNotFoundError):
        for folder in (run_directory / FOLDER).iterdir():
            if folder.name not in served:
                shutil.rmtree(folder, ignore_errors=True)


def arm_text(arm: Mapping[str, Any]) -> str:
    """Return ``1-40: better by 0.102 (+0.004 to +0.194, 120 pairs); 240 asked at share 0.1, 3 failed``."""
    num_failed, num_pairs = arm.get("num_failed") or 0, arm.get("num_pairs") or 0
    failed = f", {num_failed} failed ({arm.get('last_failure')})" if num_failed else ""
    asked = f"{arm.get('num_asked')} asked at share {arm.get('share'):g}{failed}"
    return f"{arm.get('version')}: {_found(arm) if num_pairs else 'no pair yet'}; {asked}"


def _found(arm: Mapping[str, Any]) -> str:
    difference, low, high = (float(arm.get(key) or 0) for key in ("difference", "low", "high"))
    if arm.get("decided_at"):
        found = f"{'better' if low >= 0 else 'worse'} by {abs(difference):.3f}"
    else:
        found = f"not told apart, {difference:+.3f}"
    return f"{found} ({low:+.3f} to {high:+.3f}, {arm['num_pairs']} pairs with {arm.get('compared_with')})"


def comparison_of(arm: Arm, state: ArmState, *, run: str) -> Comparison:
    """Return what an arm (b) gets more than the newest weights of its run (a), as a comparison of two versions.

    The interval is that of the confidence sequence, and rows are prompts of training. Its id is the arm's alone, and
    side a is a version only where it was the newest all the time.
    """
    newest = Side(name=f"{run} newest", run=run)
    pinned = Side(
        name=f"{run} {arm.version}" if arm.version else arm.path,
        run=run if arm.version else "",
        version=arm.version,
        model="" if arm.version else arm.path,
    )
    made = Comparison.of(newest, pinned, num_samples=1, rows={}, question={"arm": arm.arm_id}, at=arm.at, by=arm.by)
    made = msgspec.structs.replace(made, alpha=arm.alpha)
    overall = Compared(
        task="",
        num_rows=state.num_pairs,
        num_left_out=state.num_failed,
        difference=state.difference,
        low=state.low,
        high=state.high,
        wins=state.num_wins,
        ties=state.num_pairs - state.num_wins - state.num_losses,
        losses=state.num_losses,
        mcnemar_p=None,
        a=_scores(state.newest_total, state),
        b=_scores(state.pinned_total, state),
    )
    spanned = state.newest if state.oldest == state.newest else f"{state.oldest} to {state.newest}"
    version = state.newest if state.oldest == state.newest else ""
    newest = msgspec.structs.replace(newest, name=f"{run} {spanned}", version=version)
    return msgspec.structs.replace(made, a=newest, overall=overall)


def _scores(total: float, state: ArmState) -> Scores:
    return Scores(
        accuracy=total / state.num_pairs if state.num_pairs else None,
        low=None,
        high=None,
        num_scored=state.num_pairs,
        num_failed=state.num_failed,
        num_samples=1,
        pass_at={},
        reasons={state.last_failure: state.num_failed} if state.num_failed else {},
        is_graded=not state.levels.keys() <= {"-100", "0", "100"},
        num_tokens_mean=None,
    )
