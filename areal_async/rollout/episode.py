"""One sibling: the workflow runs under its deadline, and whatever happens becomes a trajectory.

Invariant: ``run_episode`` returns a trajectory for every way in which user code can end, except
cancellation and errors that end the process.
"""

import asyncio
import math
import numbers
import re
import time
from collections.abc import Mapping

import anyio

from areal_async.contracts import Workflow
from areal_async.errors import Reject, RolloutError, WorkflowError
from areal_async.rollout.boundary import attributed_to
from areal_async.rollout.merge import merge_turns
from areal_async.rollout.policy import RecordingPolicy
from areal_async.types import Prompt, Sequence, Slot, SlotStatus, Trajectory, Turn, Version, mean
from areal_async.wire import BYTES_PER_TOKEN, encode_trajectory

MAX_INFO_KEYS = 64
MAX_INFO = 1e30
OWN_INFO = frozenset(
    (
        "num_turns",
        "num_sequences",
        "num_breaks",
        "num_tool_calls",
        "num_tool_errors",
        "share_valid_tool_calls",
        "duration_s",
    )
)
"""Metrics that every trajectory brings along by itself."""
_INFO_KEY = re.compile(r"[A-Za-z0-9._/-]{1,64}")

MAX_REASON_CHARACTERS = 1000
"""The reasons of a whole group travel in the headers of one message, which hold 64 KB."""


async def call_workflow(
    workflow: Workflow, prompt: Prompt, policy: RecordingPolicy, *, name: str, deadline_s: float
) -> float:
    """Run user code to its reward.

    Raises:
        RolloutError: it raised, ran past the deadline, returned no reward, or never called the model.
        Reject: it withdrew.
    """
    with anyio.move_on_after(deadline_s) as scope, attributed_to(WorkflowError, f"workflow {name}"):
        try:
            returned = await workflow(prompt, policy)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            # Nobody cancelled this task: passed on, it would end the siblings' task group without a word.
            raise WorkflowError(f"workflow {name}: let the CancelledError of a task of its own escape") from None
        except SystemExit as exc:
            raise WorkflowError(f"workflow {name}: called sys.exit({exc.code!r})") from exc
        finally:
            policy.close()
    if scope.cancelled_caught:
        raise WorkflowError(f"workflow {name}: ran past rollout.episode_deadline_s = {deadline_s:g} s")
    reward = checked_reward(returned, policy.reply_ids, name)
    if not policy.turns:
        raise WorkflowError(
            f"workflow {name}: returned without a call of the model, need at least one; await policy.chat"
        )
    return reward


async def run_episode(
    workflow: Workflow,
    prompt: Prompt,
    policy: RecordingPolicy,
    *,
    name: str,
    sibling: int,
    sample_uid: str,
    ticket_version: str,
    deadline_s: float,
    max_bytes: int,
    max_sequence_tokens: int,
) -> Trajectory:
    """Run one sibling and return what fills its slot."""
    started = time.monotonic()
    status, reward, reason = SlotStatus.SCORED, 0.0, ""
    sequences: list[Sequence] = []
    info: dict[str, float] = {}
    try:
        reward = await call_workflow(workflow, prompt, policy, name=name, deadline_s=deadline_s)
        check_size(policy.turns, max_bytes=max_bytes, max_sequence_tokens=max_sequence_tokens)
        info = checked_info(policy.info, name)
        sequences = merge_turns(policy.turns)
    except Reject as exc:
        status, reason = SlotStatus.REJECTED, str(exc) or "rejected"
    except RolloutError as exc:
        status, reason = SlotStatus.FAILED, str(exc)
    oldest, newest = version_range(policy.turns, ticket_version)
    trajectory = Trajectory(
        slot=Slot(
            sibling=sibling,
            sample_uid=sample_uid,
            status=status,
            reward=reward,
            reason=reason[:MAX_REASON_CHARACTERS],
            num_tokens=sum(sequence.num_tokens for sequence in sequences),
            num_output_tokens=sum(len(turn.output_ids) for turn in policy.turns) if sequences else 0,
            oldest=oldest,
            newest=newest,
            num_truncated=sum(turn.finish_reason == "length" for turn in policy.turns),
        ),
        sequences=sequences,
        info={**info, **_own_info(policy, sequences), "duration_s": time.monotonic() - started},
    )
    num_bytes = len(encode_trajectory(trajectory))
    if num_bytes > max_bytes:
        return failed_trajectory(
            trajectory.slot,
            f"trajectory: got {num_bytes} bytes, need at most rollout.max_trajectory_bytes = {max_bytes}",
        )
    return trajectory


def check_size(turns: list[Turn], *, max_bytes: int, max_sequence_tokens: int) -> None:
    """Refuse, before any array is made of them, turns that make a sequence too long to train, or too much to store.

    What passes may still be too much, and is measured again when it is encoded.

    Raises:
        WorkflowError: it is so.
    """
    longest = max(len(turn.prompt_ids) + len(turn.output_ids) for turn in turns)  # the last turn of its sequence
    if longest > max_sequence_tokens:
        raise WorkflowError(
            f"trajectory: got a sequence of {longest} tokens, need at most trainer.token_budget = {max_sequence_tokens}"
        )
    num_bytes = BYTES_PER_TOKEN * max(longest, sum(len(turn.output_ids) for turn in turns))
    if num_bytes > max_bytes:
        raise WorkflowError(
            f"trajectory: got {num_bytes} bytes or more, need at most rollout.max_trajectory_bytes = {max_bytes}"
        )


def _own_info(policy: RecordingPolicy, sequences: list[Sequence]) -> dict[str, float]:
    info = {
        "num_turns": float(len(policy.turns)),
        "num_sequences": float(len(sequences)),
        "num_breaks": float(policy.num_breaks),
    }
    if policy.num_tool_calls is not None:
        info |= {"num_tool_calls": float(policy.num_tool_calls), "num_tool_errors": float(policy.num_tool_errors)}
    if policy.num_tool_calls:
        info["share_valid_tool_calls"] = 1.0 - policy.num_tool_errors / policy.num_tool_calls
    return info


def failed_trajectory(slot: Slot, reason: str) -> Trajectory:
    """Return the recorded failure that takes this slot's place."""
    return Trajectory(
        slot=Slot(
            sibling=slot.sibling,
            sample_uid=slot.sample_uid,
            status=SlotStatus.FAILED,
            reason=reason[:MAX_REASON_CHARACTERS],
            oldest=slot.oldest,
            newest=slot.newest,
        ),
        sequences=[],
    )


def checked_reward(returned: object, reply_ids: list[str], name: str) -> float:
    """Return the trajectory's one reward.

    Rewards per reply are averaged: credit within a trajectory is not told apart, every sampled token gets
    the same advantage.

    Raises:
        WorkflowError: not a finite number, or rewards for replies this trajectory does not have.
    """
    if isinstance(returned, Mapping):
        unknown = [key for key in returned if key not in reply_ids]
        if unknown or not returned:
            raise WorkflowError(f"workflow {name}: got rewards for replies {unknown}, need ids out of {reply_ids}")
        return mean([_finite(value, name) for value in returned.values()])
    return _finite(returned, name)


def checked_info(info: object, name: str) -> dict[str, float]:
    """Return the workflow's own metrics.

    Raises:
        WorkflowError: too many, a name that is none, or a value that is no finite number.
    """
    if not isinstance(info, Mapping) or len(info) > MAX_INFO_KEYS:
        raise WorkflowError(f"workflow {name}: got policy.info {info!r:.100}, need a dict of up to {MAX_INFO_KEYS}")
    bad = [key for key in info if not isinstance(key, str) or not _INFO_KEY.fullmatch(key) or key in OWN_INFO]
    if bad:
        raise WorkflowError(
            f"workflow {name}: got policy.info[{bad[0]!r:.100}], need a name of at most 64 letters, digits and ._/-, "
            f"none of {', '.join(sorted(OWN_INFO))}"
        )
    checked = {key: _finite(value, name, f"policy.info[{key!r}]") for key, value in info.items()}
    large = [key for key, value in checked.items() if abs(value) > MAX_INFO]
    if large:  # the sum over a batch has to be finite too
        raise WorkflowError(
            f"workflow {name}: got policy.info[{large[0]!r}] {checked[large[0]]}, need at most {MAX_INFO}"
        )
    return checked


def _finite(value: object, name: str, what: str = "") -> float:
    got = f"workflow {name}: got {what} {value!r:.100}" if what else f"workflow {name}: returned {value!r:.100}"
    if not isinstance(value, numbers.Real):  # bool and int are
        raise WorkflowError(f"{got}, need a {'number' if what else 'float, or {reply.id: reward}'}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise WorkflowError(f"{got}, need a finite number")
    return number


def version_range(turns: list[Turn], without_turns: str) -> tuple[str, str]:
    """Return the oldest version of any sampled token or at submission, and the newest of any sampled token."""
    if not turns:
        return without_turns, without_turns
    oldest = min(Version.parse(turn.oldest) for turn in turns)
    newest = max([Version.parse(span.version) for turn in turns for span in turn.spans], default=oldest)
    return str(oldest), str(newest)
