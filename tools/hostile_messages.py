"""Messages of hostile trajectories: well formed, and in a few things otherwise than any node of ours would have them.

``tools/hostile.py`` has them trained; each depends on nothing but its seed.
"""

import io
import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from random import Random
from typing import Any

import msgspec
import numpy as np
import PIL.Image

from areal_async.protocol.types import (
    ImageRef,
    ReplyReward,
    Sequence,
    Slot,
    SlotStatus,
    Ticket,
    Trajectory,
    Version,
    mean,
)
from areal_async.protocol.wire import EncodedMessage, encode_message
from areal_async.vision.images import Image, take_image
from areal_async.vision.spec import VisionSpec

WORKFLOW = "w"
GROUP_SIZE = 2
LINEAGE, STEP, MAX_STALENESS = 3, 9, 2
TOKEN_BUDGET = 1024
NUM_SEQUENCES = (1,) * 40 + (2,) * 10 + (3,) * 9 + (40,)
FRESH = (Version(LINEAGE, STEP - 1), Version(LINEAGE, STEP - 2), Version(LINEAGE - 1, STEP - 3))

Arrays = dict[str, Any]
"""What a ``Sequence`` is made of, before it is one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The run that messages are made for; its groups have ``GROUP_SIZE`` siblings."""

    vocab_size: int
    workflow: str = WORKFLOW
    fresh: Seq[Version] = FRESH
    """Versions that may be trained now, the newest first."""
    share_odd: float = 0.1
    """Share of messages that lack slots, or have another group size, workflow or number of attempts."""
    vision: VisionSpec | None = None
    """How its model sees; None where it does not."""
    images: tuple[Image, ...] = ()
    """What its rows show."""


def hostile_message(random: Random, group_id: str, target: Target) -> EncodedMessage:
    """Return the message of a group in which a few things are otherwise than any node of ours would have them."""
    workflow = target.workflow
    trajectories = [_trajectory(random, group_id, sibling, target) for sibling in range(GROUP_SIZE)]
    is_odd = random.random() < target.share_odd
    return encode_message(
        trajectories[: random.choice([1, 2])] if is_odd else trajectories,
        Ticket(
            row={},
            group_id=group_id,
            workflow=random.choice([workflow, "other"]) if is_odd else workflow,
            version=str(random.choice(target.fresh)),
            num_failed_attempts=random.choice([0, 2, 1 << 53]) if is_odd else 0,
            group_size=random.choice([GROUP_SIZE, 1, 3, 1 << 16]) if is_odd else GROUP_SIZE,
        ),
    )


def _trajectory(random: Random, group_id: str, sibling: int, target: Target) -> Trajectory:
    sequences = [_arrays(random, target) for _ in range(random.choice(NUM_SEQUENCES))]
    num_replies = random.choice([0, 0, 0, 1, 3])
    for arrays in sequences if num_replies else ():
        numbers = np.arange(len(arrays["token_ids"])) % (num_replies + 1) - 1
        arrays["turns"] = np.where(arrays["loss_mask"], numbers, -1).astype(np.int16)
    info: dict[str, Any] = {"length": float(random.randrange(100)), "rollout/num_turns": 1.0}
    versions = [Version.unpack(int(one)) for arrays in sequences for one in arrays["versions"] if one >= 0] or [
        target.fresh[0]
    ]
    slot: dict[str, Any] = {
        "sibling": sibling,
        "sample_uid": f"{group_id}.{sibling}.hostile.{random.randrange(1 << 32):x}",
        "status": SlotStatus.SCORED,
        "reward": random.choice([0.0, 1.0, random.random()]),
        "oldest": str(min(versions)),
        "newest": str(max(versions)),
    }
    for _ in range(random.choice([0, 0, 1, 1, 2])):
        random.choice(SPOILED)(random, random.choice(sequences), slot, info, target)
    made = [Sequence(**arrays) for arrays in sequences][: slot.pop("num_sequences", None)]
    if num_replies:
        of_replies = [sum(int(np.sum(one.turns == number)) for one in made) for number in range(num_replies)]
        rewards = [slot["reward"], *(random.choice(REWARDS[:4]) for _ in of_replies[1:])]
        slot["credits"] = [ReplyReward(reward, count) for reward, count in zip(rewards, of_replies, strict=True)]
        slot["reward"] = mean(rewards)
    num_tokens = sum(one.num_tokens for one in made)
    num_sampled = sum(int(one.loss_mask.sum()) for one in made)
    whole = {"num_tokens": num_tokens, "num_output_tokens": num_sampled} | slot
    return Trajectory(slot=Slot(**whole), sequences=made, info=info)


def _arrays(random: Random, target: Target) -> Arrays:
    if target.vision is not None and random.random() < 0.8:
        return _shown(random, target, target.vision)
    length = random.choice([2, 3, 8, 20])
    mask = np.arange(length) >= random.randrange(1, length)
    version = random.choice(target.fresh).pack()
    return {
        "token_ids": (np.frombuffer(random.randbytes(4 * length), np.uint32) % target.vocab_size).astype(np.int32),
        "loss_mask": mask,
        "logprobs": np.where(mask, -random.random() * 4, 0).astype(np.float32),
        "versions": np.where(mask, version, -1),
    }


def stored_images(vision: VisionSpec) -> tuple[Image, ...]:
    """Return images as a node stores them, and files that have the right name and are none of these."""
    noise = Random(1)
    side = vision.factor * 2
    sizes = [(side, side), (side, 2 * side), (3 * side, side), (4 * side, 4 * side)]
    drawn = [PIL.Image.frombytes("RGB", size, noise.randbytes(3 * size[0] * size[1])) for size in sizes]
    whole = [take_image(one, vision) for one in drawn]
    first = whole[0]
    files = [
        first.data[: len(first.data) // 2],
        first.data + b"more",
        first.data[:16] + bytes(8) + first.data[24:],
        first.data[:60] + b"\xff" + first.data[61:],
        whole[1].data,
        *(_file(drawn[0].convert(mode), kind) for mode, kind in (("L", "PNG"), ("P", "GIF"), ("RGBA", "PNG"))),
        _file(drawn[0].crop((0, 0, side - 1, side)), "PNG"),
        b"",
    ]
    return (*whole * 8, *(Image(data, first.width, first.height) for data in files))


def _file(image: PIL.Image.Image, kind: str) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind)
    return buffer.getvalue()


def _shown(random: Random, target: Target, vision: VisionSpec) -> Arrays:
    """Return a sequence that shows some images, each between its marks, and samples what comes after the last."""
    images = [random.choice(target.images) for _ in range(random.choice([1, 1, 2, 4]))]
    ids: list[int] = [0]
    for one in images:
        placeholders = [vision.image_token_id] * vision.num_tokens(vision.grid_of(one.width, one.height))
        ids += [vision.vision_start_token_id, *placeholders, vision.vision_end_token_id]
    num_sampled = random.choice([1, 2, 8])
    ids += [random.randrange(min(vision.vision_start_token_id, vision.image_token_id)) for _ in range(num_sampled)]
    mask = np.arange(len(ids)) >= len(ids) - num_sampled
    return {
        "token_ids": np.array(ids, dtype=np.int32),
        "loss_mask": mask,
        "logprobs": np.where(mask, -random.random() * 4, 0).astype(np.float32),
        "versions": np.where(mask, random.choice(target.fresh).pack(), -1),
        "images": [reference_to(one) for one in images],
    }


def reference_to(image: Image) -> ImageRef:
    """Return how a sequence names an image."""
    return ImageRef(sha256=image.sha256, num_bytes=len(image.data), width=image.width, height=image.height)


Spoil = Callable[[Random, Arrays, dict[str, Any], dict[str, Any], Target], None]
"""Takes a sequence, its slot and the trajectory's info, and changes one of them."""
REWARDS = [1e6, -1e6, -0.0, 5e-324, 1.0000001e6, 1e7, 1e30, 1e308, -1e308]


def _token_ids(random: Random, arrays: Arrays, slot: Any, info: Any, target: Target) -> None:
    at = random.randrange(len(arrays["token_ids"]))
    arrays["token_ids"][at] = random.choice([0, *(target.vocab_size + one for one in (-1, 0, 1)), (1 << 31) - 1, -1])


def _logprobs(random: Random, arrays: Arrays, slot: Any, info: Any, target: Target) -> None:
    value = random.choice([0.0, 1.0, 100.0, -100.0, 1e4, -9999.0, -1e4, 1.1e4, 3e38, -3e38, math.nan, math.inf])
    at = random.choice([slice(None), random.randrange(len(arrays["logprobs"]))])
    arrays["logprobs"][at] = value


def _temperatures(random: Random, arrays: Arrays, slot: Any, info: Any, target: Target) -> None:
    choices = [0.0, 1e-7, 2e-6, 1e-5, 1e-3, 0.7, 100.0, 101.0]
    length = len(arrays["token_ids"])
    mixed = [random.choice(choices[:-1]) for _ in range(length)]
    arrays["temperatures"] = np.array(random.choice([mixed, [random.choice(choices)] * length]), dtype=np.float32)


def _masks(random: Random, arrays: Arrays, slot: Any, info: Any, target: Target) -> None:
    arrays["loss_mask"] = np.full(len(arrays["loss_mask"]), random.choice([True, False]))
    arrays["versions"] = np.where(arrays["loss_mask"], target.fresh[0].pack(), -1)
    slot["oldest"], slot["newest"] = str(min(target.fresh)), str(max(target.fresh))
    if "turns" in arrays:
        arrays["turns"] = np.where(arrays["loss_mask"], 0, -1).astype(np.int16)


def _versions(random: Random, arrays: Arrays, slot: Any, info: Any, target: Target) -> None:
    newest = max(target.fresh)
    next_one, before = Version(newest.lineage, newest.step + 1), Version(newest.lineage - 1, 999_999_999)
    strange = [before, next_one, Version(newest.lineage, 0), Version(1, 1)]
    one = random.choice(strange)
    arrays["versions"] = np.where(arrays["loss_mask"], one.pack(), -1)
    ends = [Version.parse(slot["oldest"]), Version.parse(slot["newest"]), one]
    if random.random() < 0.5:
        ends = list(target.fresh)  # the header says nothing of it
    slot["oldest"], slot["newest"] = str(min(ends)), str(max(ends))


def _lengths(random: Random, arrays: Arrays, slot: Any, info: Any, target: Target) -> None:
    length = random.choice([1, TOKEN_BUDGET - 1, TOKEN_BUDGET, TOKEN_BUDGET + 1, 5000])
    for name, values in list(arrays.items()):
        if isinstance(values, np.ndarray):
            arrays[name] = np.resize(values, length)


def _header(random: Random, arrays: Arrays, slot: dict[str, Any], info: Any, target: Target) -> None:
    slot |= random.choice(
        [
            {"num_tokens": random.choice([0, 1, 1 << 53])},
            {"num_output_tokens": random.choice([0, 1, 1 << 53])},
            {"num_truncated": 1 << 53},
            {"sample_uid": random.choice(["", "a\r\nNats-Msg-Id: b", "x" * 10_000, "\u2028"])},
            {"num_sequences": 0},
            {"reason": "\x00\r\n" * 300},
        ]
    )


def _reward(random: Random, arrays: Arrays, slot: dict[str, Any], info: Any, target: Target) -> None:
    slot["reward"] = random.choice(REWARDS)


def _info(random: Random, arrays: Arrays, slot: Any, info: dict[str, Any], target: Target) -> None:
    info |= random.choice(
        [
            {"big": random.choice([1e30, -1e30, 1.1e30, 1e308, math.nan])},
            {random.choice(["", "a b", "a\n", "x" * 65, "rollout/", "ü"]): 1.0},
            {f"key{number}": 1.0 for number in range(random.choice([60, 64, 500]))},
        ]
    )


def _steered(random: Random, arrays: Arrays, slot: Any, info: Any, target: Target) -> None:
    arrays["steered"] = arrays["loss_mask"].copy()


def _images(random: Random, arrays: Arrays, slot: Any, info: Any, target: Target) -> None:
    """Have the images of a sequence be others, of other sizes or another number than its tokens say."""
    images = list(arrays.get("images") or [])
    strange = (
        reference_to(random.choice(target.images))
        if target.images
        else ImageRef(sha256="0" * 64, num_bytes=100, width=64, height=64)
    )
    sizes = [1, strange.width // 2, strange.width + 1, 2 * strange.width, 1 << 15]
    match random.randrange(5):
        case 0:
            images.append(strange)
        case 1 if images:
            images.pop(random.randrange(len(images)))
        case 2 if images:
            images[random.randrange(len(images))] = strange
        case 3 if images:
            at = random.randrange(len(images))
            width, height = random.choice(sizes), random.choice(sizes)
            images[at] = msgspec.structs.replace(images[at], width=width, height=height)
        case _ if images:
            at = random.randrange(len(images))
            changed: dict[str, Any] = random.choice(
                [{"num_bytes": 1}, {"num_bytes": 1 << 24}, {"sha256": f"{random.getrandbits(256):064x}"}]
            )
            images[at] = msgspec.structs.replace(images[at], **changed)
    arrays["images"] = images


def _marks(random: Random, arrays: Arrays, slot: Any, info: Any, target: Target) -> None:
    """Put a mark or a placeholder of images where none is, or have one that was sampled."""
    if (vision := target.vision) is not None:
        marks = [vision.image_token_id, vision.vision_start_token_id, vision.vision_end_token_id]
        arrays["token_ids"][random.randrange(len(arrays["token_ids"]))] = random.choice(marks)


SPOILED: list[Spoil] = [
    _token_ids, _logprobs, _temperatures, _masks, _versions, _lengths, _header, _reward, _info, _steered, _images,
    _marks,
]  # fmt: skip
