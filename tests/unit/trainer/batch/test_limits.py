"""A run refuses what it cannot train, and trains whatever it does not refuse.

A small budget of what ``tools/hostile.py`` does with a million messages.
"""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from areal_async.config.settings import Settings
from areal_async.errors import WireError
from areal_async.protocol import wire
from areal_async.protocol.fields import MAX_INFO_KEYS
from areal_async.protocol.types import (
    Cut,
    ReplyReward,
    Sequence,
    Slot,
    SlotStatus,
    StoredMessage,
    Ticket,
    Trajectory,
    Version,
)
from areal_async.trainer.batch.limits import TrainingLimits
from areal_async.trainer.engine.parallel.ranks import Ranks
from tools.hostile import ALGORITHMS, Course

SEED = 7
NUM_MESSAGES = 96
SETTINGS = Settings.model_validate(
    {
        "rollout": {"group_size": 2, "min_group_size": 1},
        "tasks": [{"workflow": "w.py", "dataset": {"path": "none"}}],
        "trainer": {"token_budget": 8},
    }
)
LIMITS = TrainingLimits(SETTINGS, vocab_size=100)
CUT = Cut(lineage=2, step=5, max_staleness=2)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_engine_trains_whatever_of_hostile_messages_is_accepted(
    algorithm: str, ranks: Ranks, tmp_path: Path
) -> None:
    score = Course(ALGORITHMS[algorithm], ranks, tmp_path).run(seed=SEED, first=0, count=NUM_MESSAGES)

    assert not score.findings
    assert score.num_accepted > NUM_MESSAGES / 4
    assert len(score.refusals) > 10


def _trajectory(
    *, slot: dict[str, Any] | None = None, info: dict[str, float] | None = None, **arrays: Any
) -> Trajectory:
    one = Sequence(
        token_ids=np.array([1, 99, 3], dtype=np.int32),
        loss_mask=np.array([False, True, True]),
        logprobs=np.array([0, -0.5, -0.25], dtype=np.float32),
        versions=np.array([-1, *[Version(2, 4).pack()] * 2]),
    )
    header = {"status": SlotStatus.SCORED, "num_tokens": 3, "num_output_tokens": 2, "oldest": "1-3", "newest": "2-4"}
    return Trajectory(
        slot=Slot(**({"sibling": 0, "sample_uid": "x"} | header | (slot or {}))),
        sequences=[msgspec.structs.replace(one, **arrays)],
        info=info or {},
    )


def _of_version(version: Version) -> dict[str, Any]:
    return {"versions": np.array([-1, *[version.pack()] * 2])}


def test_an_ordinary_trajectory_is_accepted() -> None:
    LIMITS.check_trajectory(_trajectory(info={"x": 1e30, "rollout/num_turns": 1.0}), cut=CUT, lineage=2)


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"token_ids": np.array([1, 100, 3], dtype=np.int32)}, "got the token id 100, need at most 99"),
        ({"logprobs": np.array([0, -1.1e4, 0], dtype=np.float32)}, "got a logprob of size 11000, need at most 10000"),
        ({"loss_mask": np.array([True, True, False])}, "got a sampled token at the start of a sequence"),
        ({"loss_mask": np.array([False, False, True])}, "got 1 sampled tokens, its header says 2"),
        (_of_version(Version(2, 5)), "got a token of version 2-5, which step 5 comes before"),
        (_of_version(Version(1, 999_999_999)), "got a token of version 1-999999999, which step 5 comes before"),
        (_of_version(Version(2, 1)), "got a token of age 3, need at most 2"),
        (_of_version(Version(3, 0)), "newer lineage"),
        ({"slot": {"reward": 1.1e6}}, "got the reward 1.1e.06, need at most 1e.06"),
        ({"slot": {"reward": -1e308}}, "got the reward -1e.308"),
        ({"slot": {"credits": [ReplyReward(-1e7, 2)]}}, "got the reward -1e.07"),
        ({"slot": {"num_tokens": 0, "num_output_tokens": 0}}, "got 0 sampled tokens of 0"),
        ({"slot": {"num_tokens": 1}}, "got 2 sampled tokens of 1"),
        ({"info": {"x": 1e31}}, "got info x 1e.31, need at most 1e.30"),
        ({"info": {"a\nb": 1.0}}, "got 'a.nb' in info"),
        ({"info": {f"k{one}": 1.0 for one in range(MAX_INFO_KEYS + 1)}}, "got 65 numbers in info, need at most 64"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused_with_what_was_got_and_is_needed(arrays: dict[str, Any], reason: str) -> None:
    with pytest.raises(WireError, match=reason):
        LIMITS.check_trajectory(_trajectory(**arrays), cut=CUT, lineage=2)


def test_a_sequence_longer_than_a_row_is_refused() -> None:
    longer = {name: np.resize(getattr(_trajectory().sequences[0], name), 9) for name in ("token_ids", "logprobs")}
    longer |= {"loss_mask": np.arange(9) == 8, "versions": np.where(np.arange(9) == 8, Version(2, 4).pack(), -1)}

    with pytest.raises(WireError, match="got a sequence of 9 tokens, need at most trainer.token_budget=8"):
        LIMITS.check_trajectory(_trajectory(**longer), cut=CUT, lineage=2)


def test_tokens_over_the_bound_pass_where_they_are_masked() -> None:
    old = _trajectory(**_of_version(Version(2, 1)))

    LIMITS.check_trajectory(old, cut=msgspec.structs.replace(CUT, masks_stale=True), lineage=2)


def test_rewards_for_single_replies_are_refused_where_a_trajectory_has_one() -> None:
    limits = TrainingLimits(
        SETTINGS.model_copy(update={"algorithm": Settings.model_validate({"algorithm": {"name": "ppo"}}).algorithm})
    )

    with pytest.raises(WireError, match="algorithm.name=ppo, which takes one for the whole trajectory"):
        limits.check_trajectory(_trajectory(slot={"credits": [ReplyReward(0.0, 2)]}), cut=CUT, lineage=2)


def _message(**given: Any) -> StoredMessage:
    base = {"group_id": "0-3-0", "workflow": "w", "ticket_version": "2-4", "num_failed_attempts": 0, "group_size": 2}
    return StoredMessage(**(base | {"slots": [_trajectory().slot], "sequence": 7, "num_bytes": 100} | given))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"workflow": "v"}, "got the workflow v, which this run does not have"),
        ({"group_size": 3}, "got a group of 3, need 2"),
        ({"slots": [_trajectory(slot={"reward": 1e7}).slot]}, "sibling 0: got the reward 1e.07"),
    ],
)
def test_headers_of_another_run_or_without_a_bound_are_refused(given: dict[str, Any], reason: str) -> None:
    LIMITS.check_message(_message())

    with pytest.raises(WireError, match=f"trajectory message 7: {reason}"):
        LIMITS.check_message(_message(**given))


@pytest.mark.parametrize("uid", ["", "a b", "a\r\nNats-Msg-Id: b", "ü", "x" * 401])
def test_a_slot_whose_name_cannot_be_a_headers_is_no_slot(uid: str) -> None:
    trajectory = _trajectory(slot={"sample_uid": uid})
    message = wire.encode_message(
        [trajectory], Ticket(row={}, group_id="0-3-0", workflow="w", version="2-4", group_size=2)
    )

    with pytest.raises(WireError, match="sample_uid"):
        wire.decode_headers(message.headers, sequence=1, num_bytes=1)
