"""A node shows a workflow the images of its ticket's row: the very files that are stored, or why there are none."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from areal_async.bus import EmbeddedBroker, Role
from areal_async.config.settings import Settings
from areal_async.protocol.evaluations import EvalResult, EvalTicket
from areal_async.protocol.types import ImageRef, Outcome, OutcomeKind, RowImage, SlotStatus, Ticket
from areal_async.protocol.wire import decode
from areal_async.vision.images import take_image
from tests.brokers import OpenRole, fetch_all, until
from tests.bus.test_node import Run
from tests.bus.test_node import settings as settings
from tests.unit.vision.pictures import noise
from tests.unit.vision.specs import shipped

pytestmark = pytest.mark.anyio

IMAGE = take_image(noise(64, 96), shipped("qwen3_vl", min_pixels=64 * 64, max_pixels=256 * 256))
REF = ImageRef(sha256=IMAGE.sha256, num_bytes=len(IMAGE.data), width=64, height=96)
WORKFLOW = """
async def play(prompt, policy):
    await policy.complete([5, 6, 7])
    if prompt["kind"] == "text":
        return 1.0
    image = prompt["images"][1]
    assert image is prompt["image"] and prompt["images"][0] is None
    assert type(image).__module__ == "areal_async.vision.images"
    assert image.sha256 == prompt["sha256"] and image.open().size == (64, 96)
    return float(image.height)
"""


@pytest.fixture
def workflow(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "play.py").write_text(WORKFLOW)


@pytest.fixture
async def run(workflow: None, broker: EmbeddedBroker, open_role: OpenRole, settings: Settings) -> Run:
    return Run(settings, *[await open_role(role) for role in (Role.OPERATOR, Role.CONTROLLER, Role.TRAINER, Role.NODE)])


@asynccontextmanager
async def serving_node(run: Run) -> AsyncIterator[None]:
    await run.announce()
    async with run.running_node():
        yield


def row_of(**cells: Any) -> dict[str, Any]:
    return {"kind": "image", "image": None, "images": [None, None], "sha256": REF.sha256, **cells}


def images_of(*, reason: str = "") -> list[RowImage]:
    first = RowImage(place=["image"], reason=reason) if reason else RowImage(place=["image"], image=REF)
    return [first, RowImage(place=["images", 1], image=REF)]


async def admit(run: Run, group_id: str, images: list[RowImage], **cells: Any) -> None:
    ticket = Ticket(group_id=group_id, workflow="play", row=row_of(**cells), group_size=4, version="1-0", images=images)
    await run.controller.publish(run.names.tickets("play"), ticket, msg_id=group_id)


async def test_all_siblings_are_shown_the_stored_image(run: Run) -> None:
    await run.controller.images.put("0-0-0", REF, IMAGE.data)
    await admit(run, "0-0-0", images_of())

    async with serving_node(run):
        slots = await run.slots(4)

    assert [(slot.status, slot.reward) for slot in slots] == [(SlotStatus.SCORED, 96.0)] * 4


@pytest.mark.parametrize(
    ("reason", "told"),
    [
        ("row 0, column image: it is damaged", "workflow play: ImageError: row 0, column image: it is damaged"),
        ("", f"image {REF.sha256} of group 0-0-0: got 0 bytes, need {REF.num_bytes}; it was not stored, or is purged"),
    ],
)
async def test_an_image_that_is_not_there_fails_who_reads_it_with_its_reason(run: Run, reason: str, told: str) -> None:
    if reason:
        await run.controller.images.put("0-0-0", REF, IMAGE.data)
    await admit(run, "0-0-0", images_of(reason=reason))
    await admit(run, "0-1-0", images_of(reason=reason), kind="text")

    async with serving_node(run):
        await run.slots(8)

    by_group = {
        group_id: [slot for message, _ in await run.stored() if message.group_id == group_id for slot in message.slots]
        for group_id in ("0-0-0", "0-1-0")
    }
    assert [slot.status for slot in by_group["0-0-0"]] == [SlotStatus.FAILED] * 4
    assert all(told in slot.reason for slot in by_group["0-0-0"])
    assert [slot.status for slot in by_group["0-1-0"]] == [SlotStatus.SCORED] * 4


async def test_a_ticket_of_a_group_that_is_over_is_acknowledged_alone(run: Run) -> None:
    over = Outcome(group_id="0-0-0", kind=OutcomeKind.TRAINED, lineage=1, step=1)
    await run.trainer.publish(run.names.outcomes, over)
    await admit(run, "0-0-0", images_of())
    await admit(run, "0-1-0", images_of(), kind="text")

    async with serving_node(run):
        await run.slots(4)

        async def no_ticket_is_left() -> bool:
            return not (await run.operator.stream_state(run.names.tickets_stream)).num_messages

        await until(no_ticket_is_left)

    assert {message.group_id for message, _ in await run.stored()} == {"0-1-0"}


async def test_an_evaluation_is_shown_the_stored_image_and_one_whose_image_is_gone_is_asked_again(run: Run) -> None:
    await run.controller.images.put(run.names.eval_group("1-0", 1), REF, IMAGE.data)
    for index in range(2):
        ticket = EvalTicket(eval_id="1-0", index=index, workflow="play", row=row_of(), images=images_of())
        await run.controller.publish(run.names.eval_tickets("play"), ticket)

    async with (
        serving_node(run),
        run.controller.consume(run.names.eval_stream, run.names.eval_controller_consumer) as inbox,
    ):
        (delivery,) = await fetch_all(inbox, 1)
        await delivery.ack()

        async def nothing_is_left() -> bool:
            return not (await run.operator.stream_state(run.names.eval_stream)).num_messages

        await until(nothing_is_left)

    result = decode(delivery.data, EvalResult)
    assert (result.index, result.reward, result.error) == (1, 96.0, "")
