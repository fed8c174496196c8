"""What fills a slot: a trajectory, made of the turns that a policy has recorded and of how its workflow ended.

Pure. Invariant: ``fill_slot`` returns a trajectory whatever user code returned or raised.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from areal_async.config.settings import MAX_CREDIT_BYTES
from areal_async.errors import Reject, RolloutError, WorkflowError
from areal_async.protocol.fields import (
    CACHED_TOKENS,
    MAX_IMAGES,
    MAX_INFO,
    MAX_INFO_KEYS,
    OWN_INFO,
    PROMPT_TOKENS,
    is_info_key,
)
from areal_async.protocol.types import (
    ReplyReward,
    Sequence,
    Slot,
    SlotStatus,
    StoredMessage,
    Ticket,
    Trajectory,
    Turn,
    Version,
)
from areal_async.protocol.wire import BYTES_PER_TOKEN, MAX_SEQUENCES, encode_trajectory, max_encoded_bytes
from areal_async.rollout.policy.merge import merge_turns
from areal_async.rollout.policy.policy import RecordingPolicy
from areal_async.rollout.rewards.reply_rewards import Ending, Scores, credits_of, given_number
from areal_async.rollout.user_code.boundary import attributed_to, shown, text_of

MAX_REASON_CHARACTERS = 1000
"""The reasons of a whole group travel in the headers of one message, which hold 64 KB."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotSpec:
    """The slot that is to be filled, and what fits it."""

    workflow: str
    sibling: int
    sample_uid: str
    ticket_version: str
    max_bytes: int
    """Size of the trajectory, encoded."""
    max_sequence_tokens: int
    """Length of its longest sequence, which has to be trained in one row."""
    max_credit_bytes: int = MAX_CREDIT_BYTES
    """Size of the rewards of its replies, in the header."""
    one_reward_for: str = ""
    """The setting that takes one reward for a whole trajectory; empty where its replies may have their own."""


def missing_siblings(ticket: Ticket, stored: Iterable[StoredMessage]) -> list[int]:
    """Return the siblings without a stored slot, no matter who produced the others: what a leased ticket is owed."""
    found = {slot.sibling for message in stored for slot in message.slots}
    return [sibling for sibling in range(ticket.group_size) if sibling not in found]


def fill_slot(policy: RecordingPolicy, ending: Ending, spec: SlotSpec, *, duration_s: float) -> Trajectory:
    """Return what is stored of one sibling."""
    status, reward, reason = SlotStatus.SCORED, 0.0, ""
    sequences: list[Sequence] = []
    credits: list[ReplyReward] = []
    info: dict[str, float] = {}
    try:
        if not isinstance(ending, Scores):
            raise ending
        if ending.by_turn and spec.one_reward_for:
            raise WorkflowError(
                f"workflow {spec.workflow}: got rewards for replies with {spec.one_reward_for}, which takes one for "
                "the whole trajectory; return a float, or choose another algorithm"
            )
        check_size(policy.turns, max_bytes=spec.max_bytes, max_sequence_tokens=spec.max_sequence_tokens)
        with attributed_to(WorkflowError, f"workflow {spec.workflow}: policy.info"):
            info = checked_info(policy.info, spec.workflow)
        credits = credits_of(ending, policy.turns, name=spec.workflow, max_bytes=spec.max_credit_bytes)
        numbers = {turn: number for number, turn in enumerate(ending.by_turn)}
        sequences = merge_turns(policy.turns, numbers if credits else None)
        if len(sequences) > MAX_SEQUENCES:
            num_sequences, sequences, credits = len(sequences), [], []
            raise WorkflowError(
                f"trajectory: got {num_sequences} sequences, need at most {MAX_SEQUENCES}; let more prompts extend "
                "what was said before"
            )
        reward = ending.reward
    except Reject as exc:
        status, reason = SlotStatus.REJECTED, text_of(exc) or "rejected"
    except RolloutError as exc:
        status, reason = SlotStatus.FAILED, text_of(exc)
    own = _own_info(policy, sequences) | {"duration_s": duration_s}
    if credits:
        own["num_uncredited"] = float(len(policy.turns) - len(credits))
    oldest, newest = version_range(policy.turns, spec.ticket_version)
    trajectory = Trajectory(
        slot=Slot(
            sibling=spec.sibling,
            sample_uid=spec.sample_uid,
            status=status,
            reward=reward,
            reason=reason[:MAX_REASON_CHARACTERS],
            num_tokens=sum(sequence.num_tokens for sequence in sequences),
            num_output_tokens=sum(len(turn.output_ids) for turn in policy.turns) if sequences else 0,
            oldest=oldest,
            newest=newest,
            num_truncated=sum(turn.finish_reason == "length" for turn in policy.turns),
            credits=credits,
        ),
        sequences=sequences,
        info=info | {f"{OWN_INFO}{name}": value for name, value in own.items()},
    )
    num_bytes = max_encoded_bytes(trajectory)
    if num_bytes > spec.max_bytes and (num_bytes := len(encode_trajectory(trajectory))) > spec.max_bytes:
        return failed_trajectory(
            trajectory.slot,
            f"trajectory: got {num_bytes} bytes, need at most rollout.max_trajectory_bytes = {spec.max_bytes}",
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
    if (num_images := max(len(turn.images) for turn in turns)) > MAX_IMAGES:
        raise WorkflowError(f"trajectory: got {num_images} images in a sequence, need at most {MAX_IMAGES}; show fewer")
    num_bytes = BYTES_PER_TOKEN * max(longest, sum(len(turn.output_ids) for turn in turns))
    if num_bytes > max_bytes:
        raise WorkflowError(
            f"trajectory: got {num_bytes} bytes or more, need at most rollout.max_trajectory_bytes = {max_bytes}"
        )


def _own_info(policy: RecordingPolicy, sequences: list[Sequence]) -> dict[str, float]:
    record = policy.record
    info = {
        "num_turns": float(len(record.turns)),
        "num_sequences": float(len(sequences)),
        "num_breaks": float(record.num_breaks),
    }
    if prompt_tokens := sum(turn.prompt_tokens for turn in record.turns):  # servers have counted
        info |= {
            PROMPT_TOKENS: float(prompt_tokens),
            CACHED_TOKENS: float(sum(turn.cached_tokens for turn in record.turns)),
        }
    if record.num_tool_calls is not None:
        info |= {"num_tool_calls": float(record.num_tool_calls), "num_tool_errors": float(record.num_tool_errors)}
    if record.num_tool_calls:
        info["share_valid_tool_calls"] = 1.0 - record.num_tool_errors / record.num_tool_calls
    return info


def failed_trajectory(slot: Slot, reason: str) -> Trajectory:
    """Return the recorded failure that takes this slot's spec."""
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


def checked_info(info: object, name: str) -> dict[str, float]:
    """Return the workflow's own metrics.

    Raises:
        WorkflowError: too many, a name that is none, or a value that is no finite number.
    """
    if not isinstance(info, Mapping) or len(info) > MAX_INFO_KEYS:
        raise WorkflowError(f"workflow {name}: got policy.info {shown(info)}, need a dict of up to {MAX_INFO_KEYS}")
    bad = [key for key in info if not isinstance(key, str) or not is_info_key(key) or key.startswith(OWN_INFO)]
    if bad:
        raise WorkflowError(
            f"workflow {name}: got policy.info[{shown(bad[0])}], need a name of at most 64 letters, digits and ._/-, "
            f"which does not begin with {OWN_INFO}"
        )
    checked = {key: given_number(value, name, f"policy.info[{key!r}]") for key, value in info.items()}
    large = [key for key, value in checked.items() if abs(value) > MAX_INFO]
    if large:  # the sum over a batch has to be finite too
        raise WorkflowError(
            f"workflow {name}: got policy.info[{large[0]!r}] {checked[large[0]]}, need at most {MAX_INFO}"
        )
    return checked


def version_range(turns: list[Turn], without_turns: str) -> tuple[str, str]:
    """Return the oldest version of any sampled token or at submission, and the newest of any sampled token."""
    if not turns:
        return without_turns, without_turns
    oldest = min(Version.parse(turn.oldest) for turn in turns)
    newest = max([Version.parse(span.version) for turn in turns for span in turn.spans], default=oldest)
    return str(oldest), str(newest)
