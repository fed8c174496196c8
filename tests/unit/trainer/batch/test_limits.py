"""A run refuses what it cannot train, and trains whatever it does not refuse.

A small budget of what ``tools/hostile.py`` does with a million messages.
"""

from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import PIL.Image
import pytest

from areal_async.config.settings import Settings
from areal_async.errors import WireError
from areal_async.inference.request import ref_of
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
from areal_async.vision.images import Image, take_image
from tests.unit.vision.specs import shipped
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
    score = Course(ALGORITHMS[algorithm], ranks, tmp_path, sees=algorithm == "seeing").run(
        seed=SEED, first=0, count=NUM_MESSAGES
    )

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


SPEC = shipped("qwen3_vl", min_pixels=64 * 64)
START, PAD, STOP = SPEC.vision_start_token_id, SPEC.image_token_id, SPEC.vision_end_token_id
ROOMY = SETTINGS.model_copy(update={"trainer": SETTINGS.trainer.model_copy(update={"token_budget": 64})})
SEES = TrainingLimits(ROOMY, vision=SPEC)


def _shows(images: list[Image], ids: list[int] | None = None) -> Trajectory:
    """A trajectory whose prompt shows these; ``ids``: the tokens of its prompt instead."""
    told = [SPEC.num_tokens(SPEC.grid_of(one.width, one.height)) for one in images]
    prompt = ids or [1, *(token for count in told for token in (START, *[PAD] * count, STOP))]
    length = len(prompt) + 2
    return _trajectory(
        token_ids=np.array([*prompt, 3, 4], dtype=np.int32),
        loss_mask=np.arange(length) >= length - 2,
        logprobs=np.zeros(length, dtype=np.float32),
        versions=np.where(np.arange(length) >= length - 2, Version(2, 4).pack(), -1),
        images=[ref_of(one) for one in images] or None,
    )


def _taken(color: str, width: int = 64, height: int = 64) -> Image:
    return take_image(PIL.Image.new("RGB", (width, height), color), SPEC)


def test_images_are_accepted_as_the_model_sees_them() -> None:
    red, blue = _taken("red"), _taken("blue", 64, 96)

    SEES.check_trajectory(_shows([]), cut=CUT, lineage=2)
    SEES.check_trajectory(_shows([red, blue, red]), cut=CUT, lineage=2)
    SEES.check_image(ref_of(blue), blue.data)


@pytest.mark.parametrize(
    ("images", "ids", "reason"),
    [
        ([_taken("red")], [1, START, PAD, PAD, PAD, STOP], "got 3 placeholders for the image at token 2, need 4"),
        ([_taken("red", 64, 96)], [1, START, PAD, PAD, PAD, PAD, STOP], "got 4 placeholders .* need 6"),
        ([_taken("red")], [1, 2, 5], "got 1 images, need 0"),
        ([], [1, START, PAD, PAD, PAD, PAD, STOP], "got 0 images, need 1"),
        ([], [1, PAD, 2], "without both marks around"),
    ],
)  # fmt: skip
def test_tokens_that_show_something_else_than_the_images_are_refused(
    images: list[Image], ids: list[int], reason: str
) -> None:
    with pytest.raises(WireError, match=reason):
        SEES.check_trajectory(_shows(images, ids), cut=CUT, lineage=2)


def test_an_image_of_a_size_that_the_model_does_not_take_is_refused() -> None:
    odd = msgspec.structs.replace(ref_of(_taken("red")), width=65)
    shows = _shows([_taken("red")])
    sequence = msgspec.structs.replace(shows.sequences[0], images=[odd])

    with pytest.raises(WireError, match="got 65 x 64 pixels, need positive multiples of 32"):
        SEES.check_trajectory(msgspec.structs.replace(shows, sequences=[sequence]), cut=CUT, lineage=2)


@pytest.mark.parametrize(("width", "height"), [(32, 32), (32, 512), (512, 32), (512, 512)])
def test_a_file_is_no_larger_than_its_pixels_need(width: int, height: int) -> None:
    """A PNG may hold what is no pixel of it: a slot of few tokens could have a trainer read all that is stored."""
    spec = shipped("qwen3_vl", min_pixels=32 * 32, max_pixels=512 * 512)
    noise = np.random.default_rng(7).integers(0, 256, (height, width, 3), dtype=np.uint8)
    image = take_image(PIL.Image.fromarray(noise), spec)
    roomy = SETTINGS.model_copy(update={"trainer": SETTINGS.trainer.model_copy(update={"token_budget": 512})})
    sees, shows = TrainingLimits(roomy, vision=spec), _shows([image])

    sees.check_trajectory(shows, cut=CUT, lineage=2)
    most = 4 * width * height + 1024
    sequence = msgspec.structs.replace(
        shows.sequences[0], images=[msgspec.structs.replace(ref_of(image), num_bytes=most + 1)]
    )
    with pytest.raises(
        WireError, match=f"got an image of {most + 1} bytes for {width} x {height} pixels, need at most {most}"
    ):
        sees.check_trajectory(msgspec.structs.replace(shows, sequences=[sequence]), cut=CUT, lineage=2)


def test_an_image_file_is_held_against_its_name_and_the_model() -> None:
    red = _taken("red")
    jpeg = BytesIO()
    PIL.Image.new("RGB", (64, 64)).save(jpeg, "JPEG")

    with pytest.raises(WireError, match="got 64 x 64 pixels, need 64 x 96"):
        SEES.check_image(msgspec.structs.replace(ref_of(red), height=96), red.data)
    for damaged in (red.data[:100], jpeg.getvalue(), b""):
        with pytest.raises(WireError, match="no whole PNG"):
            SEES.check_image(ref_of(red), damaged)


def test_a_model_that_does_not_see_is_shown_nothing() -> None:
    red = _taken("red")
    blind = TrainingLimits(ROOMY)

    with pytest.raises(WireError, match="got 1 images, which the model cannot see"):
        blind.check_trajectory(_shows([red]), cut=CUT, lineage=2)
    with pytest.raises(WireError, match="which the model cannot see"):
        blind.check_image(ref_of(red), red.data)


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
