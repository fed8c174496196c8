"""What a workflow returns, checked: one reward for all of a trajectory, or one for each reply that it names. Pure.

The value of a reply is that reply's return: its tokens are trained with it (``algorithms.credit``). Replies that are
not named are read and never trained.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from areal_async.errors import ContextFull, Reject, RolloutError, WorkflowError
from areal_async.protocol.fields import MAX_CREDITS, MAX_REWARD, is_role
from areal_async.protocol.types import ReplyReward, Turn, mean
from areal_async.rollout.rewards.number import finite_number
from areal_async.rollout.user_code.boundary import attributed_to, shown


class Scores(NamedTuple):
    """The rewards of one trajectory."""

    reward: float
    """The mean of ``by_turn`` where that is not empty."""
    by_turn: dict[int, float] = {}
    """Place of a credited turn -> its return, in the order of the turns; empty where ``reward`` is for all of them."""


Ending = Scores | Reject | RolloutError
"""How a workflow ended for one sibling."""


def ending_of(
    returned: object, reply_ids: Sequence[str], name: str, *, failures: Sequence[RolloutError], may_withdraw: bool
) -> Ending:
    """Return the rewards of one sibling, if its agent was answered, or has outgrown the context, as it ended.

    An agent that was denied an answer has not been itself. One with a full context that returns a reward all the
    same has taken note of it.

    Args:
        reply_ids: of the sibling's turns, in their order.
        name: of the workflow.
        failures: what the last requests of the sibling's agents came to.
        may_withdraw: whether a ``Reject`` may be returned as well as raised.
    """
    if may_withdraw and isinstance(returned, Reject):
        return returned
    for failure in failures:
        if not isinstance(failure, ContextFull):
            return failure
    try:
        with attributed_to(WorkflowError, f"workflow {name}"):
            scores = checked_scores(returned, reply_ids, name)
            if not reply_ids:
                raise WorkflowError(
                    f"workflow {name}: returned without a call of the model, need at least one; await policy.chat"
                )
            return scores
    except (Reject, RolloutError) as exc:
        return exc


def checked_scores(returned: object, reply_ids: Sequence[str], name: str) -> Scores:
    """Return the rewards of one trajectory.

    Args:
        reply_ids: of its turns, in their order.
        name: of the workflow.

    Raises:
        WorkflowError: not a finite number of at most ``MAX_REWARD``, or rewards for replies that the trajectory does
            not have, or for too many.
    """
    if not isinstance(returned, Mapping):
        return Scores(_reward(returned, name))
    if not returned or not set(returned) <= set(reply_ids):
        unknown = [key for key in returned if key not in reply_ids]
        raise WorkflowError(
            f"workflow {name}: got rewards for replies {shown(unknown)}, need ids out of {list(reply_ids)!r:.500}"
        )
    if len(returned) > MAX_CREDITS:
        raise WorkflowError(
            f"workflow {name}: got rewards for {len(returned)} replies, need at most {MAX_CREDITS}; "
            "name fewer, or return one number for all of them"
        )
    values = {key: _reward(value, name) for key, value in returned.items()}
    by_turn = {place: values[reply_id] for place, reply_id in enumerate(reply_ids) if reply_id in values}
    return Scores(mean(list(by_turn.values())), by_turn)


def _reward(returned: object, name: str) -> float:
    reward = given_number(returned, name)
    if abs(reward) > MAX_REWARD:
        raise WorkflowError(
            f"workflow {name}: returned {reward:g}, need at most {MAX_REWARD:g} either way; scale the reward"
        )
    return reward


def credits_of(scores: Scores, turns: Sequence[Turn], *, name: str, max_bytes: int) -> list[ReplyReward]:
    """Return the credits of a slot's header.

    Args:
        max_bytes: of all of them together, as they travel.

    Raises:
        WorkflowError: they take more, or a role cannot travel.
    """
    credits = [
        ReplyReward(reward, len(turns[place].output_ids), turns[place].role) for place, reward in scores.by_turn.items()
    ]
    strange = [credit.role for credit in credits if not is_role(credit.role)]
    if strange:
        raise WorkflowError(
            f"workflow {name}: got a policy named {strange[0]!r:.100}, need at most 64 letters, digits and _-"
        )
    num_bytes = credit_bytes(credits)
    if num_bytes > max_bytes:
        raise WorkflowError(
            f"workflow {name}: got rewards for {len(credits)} replies, which take {num_bytes} bytes, need at most "
            f"{max_bytes} so that the header of a batch fits a message; name fewer, or round the rewards"
        )
    return credits


def credit_bytes(credits: Sequence[ReplyReward]) -> int:
    """Return what they take in a header."""
    return len(msgspec.json.encode(credits)) if credits else 0


def given_number(value: object, name: str, what: str = "") -> float:
    """Return a number that a workflow gave.

    Args:
        name: of the workflow.
        what: it gave; empty for what it returned.

    Raises:
        WorkflowError: it is none, or not finite.
    """
    return finite_number(
        value,
        got=f"workflow {name}: got {what}" if what else f"workflow {name}: returned",
        need="a number" if what else "a float, or {reply.id: reward}",
        error=WorkflowError,
    )
