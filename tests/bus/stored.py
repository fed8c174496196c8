"""What the tests of trainer and controller put on the bus in the place of a node."""

import hashlib
from collections.abc import Sequence as Seq

import numpy as np

from areal_async.bus import Bus
from areal_async.protocol.types import ImageRef, Sequence, Slot, SlotStatus, Ticket, Trajectory, Version
from areal_async.protocol.wire import BYTES_PER_TOKEN, encode_message

WORKFLOW = "w"


def trajectory(
    group_id: str,
    sibling: int,
    *,
    version: str = "1-0",
    failed: str = "",
    producer: str = "a",
    images: list[ImageRef] | None = None,
) -> Trajectory:
    """A trajectory of three tokens, two of them sampled; the reward is the sibling's number."""
    packed = Version.parse(version).pack()
    sequence = Sequence(
        token_ids=np.array([1, 2, 3], dtype=np.int32),
        loss_mask=np.array([False, True, True]),
        logprobs=np.array([0, -0.5, -0.25], dtype=np.float32),
        versions=np.array([-1, packed, packed], dtype=np.int64),
        images=images,
    )
    slot = Slot(
        sibling=sibling,
        sample_uid=f"{group_id}.{sibling}.{producer}",
        status=SlotStatus.FAILED if failed else SlotStatus.SCORED,
        reason=failed,
        reward=0.0 if failed else float(sibling),
        num_tokens=0 if failed else 3,
        num_output_tokens=0 if failed else 2,
        oldest=version,
        newest=version,
    )
    return Trajectory(slot=slot, sequences=[] if failed else [sequence])


def ref_of(data: bytes) -> ImageRef:
    """The name of an image whose file is ``data``."""
    return ImageRef(sha256=hashlib.sha256(data).hexdigest(), num_bytes=len(data), width=8, height=8)


def giant(group_id: str, sibling: int, *, num_bytes: int, version: str = "1-0") -> Trajectory:
    """A trajectory of about that many bytes; every token is the sibling's number."""
    num_tokens = num_bytes // BYTES_PER_TOKEN
    sequence = Sequence(
        token_ids=np.full(num_tokens, sibling, dtype=np.int32),
        loss_mask=np.ones(num_tokens, dtype=np.bool_),
        logprobs=np.zeros(num_tokens, dtype=np.float32),
        versions=np.full(num_tokens, Version.parse(version).pack(), dtype=np.int64),
    )
    slot = Slot(
        sibling=sibling,
        sample_uid=f"{group_id}.{sibling}.a",
        status=SlotStatus.SCORED,
        num_tokens=num_tokens,
        num_output_tokens=num_tokens,
        oldest=version,
        newest=version,
    )
    return Trajectory(slot=slot, sequences=[sequence])


async def store(
    bus: Bus, group_id: str, siblings: Seq[int], *, group_size: int, version: str = "1-0", failed: str = "",
    producer: str = "a", num_failed_attempts: int = 0,
) -> None:  # fmt: skip
    """Store some siblings of a group in one message."""
    payload, headers, _ = encode_message(
        [trajectory(group_id, sibling, version=version, failed=failed, producer=producer) for sibling in siblings],
        Ticket(
            row={},
            group_id=group_id,
            workflow=WORKFLOW,
            version=version,
            num_failed_attempts=num_failed_attempts,
            group_size=group_size,
        ),
    )
    await bus.publish(bus.names.trajectories(WORKFLOW, group_id), payload, headers=headers)


def ticket(group_id: str, *, group_size: int, version: str = "1-0") -> Ticket:
    """An admission of the group."""
    return Ticket(group_id=group_id, workflow=WORKFLOW, row={}, group_size=group_size, version=version)
