"""The images of a row are stored before the ticket that names them, also where room has to be waited for."""

from pathlib import Path
from typing import Any

import anyio
import pytest

from areal_async.bus import Bus, Role
from areal_async.bus.images import Images
from areal_async.config.settings import MIN_IMAGE_STREAM_BYTES, Settings
from areal_async.controller import row_images
from areal_async.controller.accounts import Accounts
from areal_async.controller.controller import Controller
from areal_async.controller.evaluation import Evaluator
from areal_async.controller.row_images import RowImages
from areal_async.controller.tasks import Tasks
from areal_async.data.images import ImageCell
from areal_async.errors import StreamFullError
from areal_async.protocol.evaluations import EvalResult, EvalTicket
from areal_async.protocol.journal import Journal
from areal_async.protocol.subjects import Names
from areal_async.protocol.types import ImageRef, Outcome, OutcomeKind, Version
from areal_async.protocol.wire import decode
from areal_async.telemetry import wait_graph
from areal_async.trainer.batch.image_sweep import ImageSweep
from areal_async.trainer.batch.planner import BatchPlanner
from areal_async.vision.images import take_image
from tests.brokers import PATIENCE_S, OpenRole, fetch_all, until
from tests.bus.admissions import dying
from tests.bus.stored import ref_of
from tests.bus.test_controller import World, running
from tests.bus.test_controller import settings as settings
from tests.bus.test_controller import world as world
from tests.unit.vision.pictures import encoded, noise
from tests.unit.vision.specs import shipped

pytestmark = pytest.mark.anyio

RUN = Names("test")
SPEC = shipped("qwen3_vl", min_pixels=64 * 64, max_pixels=256 * 256)


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row_images, "ROOM_POLL_S", 0.01)


def picture(seed: int) -> bytes:
    """An image's file, of 12 KB, of another color in each pixel."""
    return encoded(noise(64, 64, seed=seed))


def cell(data: bytes) -> ImageCell:
    return ImageCell(bytes=data, path=None)


class SeenRows(list[dict[str, Any]]):
    """Rows as a data set has them, of which each column but the question is of images."""

    @property
    def features(self) -> dict[str, Any]:
        import datasets

        image = datasets.Image(decode=False)
        kinds = {"image": image, "images": datasets.List(image)}
        return {name: kinds.get(name, datasets.Value("string")) for name in self[0]}


def rows_of(num_rows: int, *, seed: int = 0) -> SeenRows:
    return SeenRows(
        {"image": {"bytes": picture(seed + number), "path": None}, "question": f"{number}?"}
        for number in range(num_rows)
    )


def refs_of(data: bytes) -> tuple[ImageRef, bytes]:
    image = take_image(data, SPEC)
    return (
        ImageRef(sha256=image.sha256, num_bytes=len(image.data), width=image.width, height=image.height),
        image.data,
    )


def reading(bus: Bus, rows: SeenRows, settings: Settings, **keywords: Any) -> RowImages:
    return RowImages(bus, Tasks([("w", rows)]), settings, SPEC, **keywords)


async def fill(bus: Bus, settings: Settings, *, share: float, group_id: str = "0-99-0") -> None:
    """Fill a share of the stream with images of another group."""
    num_bytes = int(share * settings.rollout.max_image_stream_bytes)
    data = noise(1024, 1024).tobytes()
    for number in range(num_bytes // (1 << 20)):
        one = number.to_bytes(4, "big") + data[: (1 << 20) - 4]
        await bus.images.put(group_id, ref_of(one), one)


async def is_newest() -> bool:
    return True


async def purge(bus: Bus, group_id: str) -> None:
    await bus.images.purge([group_id], is_newest=is_newest)


async def test_a_ticket_names_images_that_are_stored_and_its_row_has_none(
    open_role: OpenRole, settings: Settings
) -> None:
    controller, node = await open_role(Role.CONTROLLER), await open_role(Role.NODE)
    red, blue = picture(1), picture(2)
    row = {"image": {"bytes": red, "path": None}, "images": [{"bytes": one, "path": None} for one in (blue, red)]}
    rows = reading(controller, SeenRows([row]), settings)

    ready = await rows.ready(0, "0-0-0")

    assert (ready.workflow, ready.row) == ("w", {"image": None, "images": [None, None]})
    assert [one.place for one in ready.images] == [["image"], ["images", 0], ["images", 1]]
    for one, data in zip(ready.images, (red, blue, red), strict=True):
        ref, file = refs_of(data)
        assert one.image == ref
        assert await node.images.get("0-0-0", ref) == file
    assert (await node.stream_state(RUN.images_stream)).num_messages == 2


async def test_rows_of_text_alone_are_passed_on_without_a_look_at_the_stream(
    open_role: OpenRole, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Images, "has_room_to_admit", None)
    row = {"question": "1+1?"}
    tasks = Tasks([("w", [row]), ("seen", rows_of(1))])

    rows = RowImages(await open_role(Role.CONTROLLER), tasks, settings, SPEC)

    assert await rows.ready(0, "0-0-0") == ("w", row, [])
    assert (rows.has_images(0), rows.has_images(1)) == (False, True)


async def test_what_cannot_be_taken_in_is_told_in_the_ticket_and_the_rest_is_stored(
    open_role: OpenRole, settings: Settings
) -> None:
    controller = await open_role(Role.CONTROLLER)
    row = {"image": {"bytes": b"no image", "path": None}, "images": [{"bytes": picture(1), "path": None}]}

    ready = await reading(controller, SeenRows([row]), settings).ready(0, "0-0-0")

    good, bad = ready.images
    assert (good.place, good.image) == (["images", 0], refs_of(picture(1))[0])
    assert (bad.place, bad.image) == (["image"], None)
    assert bad.reason.startswith("row 0, column image: image: got no whole image, need a PNG, JPEG, GIF or WebP")


async def test_a_model_that_does_not_see_has_nothing_stored(open_role: OpenRole, settings: Settings) -> None:
    controller = await open_role(Role.CONTROLLER)
    named = settings.model_copy(update={"model": settings.model.model_copy(update={"path": "tiny"})})

    ready = await RowImages(controller, Tasks([("w", rows_of(1))]), named).ready(0, "0-0-0")

    assert (ready.row["image"], ready.row["question"]) == (None, "0?")
    assert "got an image, which the model tiny cannot see" in ready.images[0].reason
    assert await controller.images.groups() == []


async def test_a_row_whose_images_take_much_of_the_stream_has_none(open_role: OpenRole, settings: Settings) -> None:
    small = settings.rollout.model_copy(update={"max_image_stream_bytes": MIN_IMAGE_STREAM_BYTES})
    settings = settings.model_copy(update={"rollout": small})
    """They could fill it in part, without a ticket: nobody would make room."""
    controller = await open_role(Role.CONTROLLER)
    large = shipped("qwen3_vl", min_pixels=64 * 64, max_pixels=1024 * 1024)
    row = {"image": {"bytes": encoded(noise(800, 800)), "path": None}}

    ready = await RowImages(controller, Tasks([("w", SeenRows([row]))]), settings, large).ready(0, "0-0-0")

    assert ready.images[0].reason == (
        "row 0: got images of more than 1677721 bytes, need at most that; "
        "leave some out, or raise rollout.max_image_stream_bytes"
    )
    assert await controller.images.groups() == []


async def test_what_a_node_has_stored_under_its_name_does_not_end_the_controller(
    open_role: OpenRole, settings: Settings
) -> None:
    controller, node = await open_role(Role.CONTROLLER), await open_role(Role.NODE)
    ref, _ = refs_of(picture(0))
    await node.api.store(RUN.images("0-0-0", ref.sha256), b"forged")

    ready = await reading(controller, rows_of(1), settings).ready(0, "0-0-0")

    assert "what is stored under its name is none of ours" in ready.images[0].reason


async def test_a_row_waits_for_room_and_says_so(open_role: OpenRole, settings: Settings) -> None:
    controller, trainer = await open_role(Role.CONTROLLER), await open_role(Role.TRAINER)
    rows = reading(controller, rows_of(1), settings)
    await fill(controller, settings, share=0.9)
    done = anyio.Event()

    async def admit() -> None:
        await rows.ready(0, "0-0-0")
        done.set()

    with anyio.fail_after(PATIENCE_S):
        async with anyio.create_task_group() as admitting:
            admitting.start_soon(admit)
            await until(lambda: bool(rows.waits_for))
            assert rows.waits_for == "room for the images of group 0-0-0 in their stream"
            records = wait_graph.report(wait_graph.ADMISSION).records
            assert [(one.waiter, one.what, one.on) for one in records] == [
                (wait_graph.ADMISSION, "room for images, made by", wait_graph.TRAINER)
            ]
            assert not done.is_set()
            await purge(trainer, "0-99-0")
            await done.wait()

    assert rows.waits_for == ""
    assert await controller.images.groups() == ["0-0-0"]


async def test_a_stream_that_is_full_in_the_middle_is_waited_for(
    open_role: OpenRole, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller, trainer = await open_role(Role.CONTROLLER), await open_role(Role.TRAINER)
    row = {"images": [{"bytes": picture(number), "path": None} for number in range(3)]}
    rows = reading(controller, SeenRows([row]), settings)
    put, num_full = controller.images.put, 0

    async def full_at_the_second(group_id: str, ref: ImageRef, data: bytes) -> None:
        nonlocal num_full
        if ref == refs_of(picture(1))[0] and num_full < 2:
            num_full += 1
            raise StreamFullError("full")
        await put(group_id, ref, data)

    monkeypatch.setattr(controller.images, "put", full_at_the_second)

    ready = await rows.ready(0, "0-0-0")

    assert num_full == 2
    assert [one.image for one in ready.images] == [refs_of(picture(number))[0] for number in range(3)]
    assert (await trainer.stream_state(RUN.images_stream)).num_messages == 3


async def test_one_row_at_a_time_is_stored_so_that_one_at_most_is_there_in_part(
    open_role: OpenRole, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many in part and none whole would fill the stream, and no group would run that could make room."""
    controller = await open_role(Role.CONTROLLER)
    row = {"images": [{"bytes": picture(number), "path": None} for number in range(3)]}
    rows = reading(controller, SeenRows([row] * 4), settings)
    put, stored = controller.images.put, list[str]()

    async def noted(group_id: str, ref: ImageRef, data: bytes) -> None:
        await put(group_id, ref, data)
        stored.append(group_id)

    monkeypatch.setattr(controller.images, "put", noted)
    async with anyio.create_task_group() as admitting:
        for number in range(4):
            admitting.start_soon(rows.ready, number, f"0-{number}-0")

    assert stored == [f"0-{number}-0" for number in range(4) for _ in range(3)]


def controller_of(bus: Bus, settings: Settings, rows: SeenRows, evaluator: Evaluator | None = None) -> Controller:
    accounts = Accounts(max_groups_in_flight=settings.rollout.max_groups_in_flight)
    return Controller(bus, settings, Tasks([("w", rows)]), evaluator, accounts=accounts, vision=SPEC)


async def test_admission_goes_on_when_there_is_room_and_every_ticket_has_its_image(
    open_role: OpenRole, settings: Settings, world: World
) -> None:
    rows = rows_of(5)
    controller = controller_of(await open_role(Role.CONTROLLER), settings, rows)
    await fill(world.node, settings, share=0.9)
    await world.hold("1-0")
    async with running(controller):
        assert await world.tickets(0, controller, waits_for="room for the images of group 0-") == []
        assert controller.report()["waits_for"].startswith("room for the images")
        await purge(world.trainer, "0-99-0")
        tickets = await world.tickets(4, controller)

    for ticket in tickets:
        ref, file = refs_of(rows[int(ticket.group_id.split("-")[1])]["image"]["bytes"])
        assert [one.image for one in ticket.images] == [ref]
        assert await world.node.images.get(ticket.group_id, ref) == file


async def test_a_controller_that_dies_before_its_tickets_stores_no_image_twice(
    open_role: OpenRole, settings: Settings, world: World, tmp_path: Path
) -> None:
    rows = rows_of(5)
    await world.hold("1-0")
    with dying("before_cursor", 1, tmp_path), anyio.fail_after(PATIENCE_S):
        await controller_of(await open_role(Role.CONTROLLER), settings, rows).run()
    before = await world.all_tickets()
    stored = (await world.node.stream_state(RUN.images_stream)).num_messages

    again = controller_of(await open_role(Role.CONTROLLER, "1"), settings, rows)
    async with running(again):
        tickets = await world.tickets(4, again)

    assert tickets == before
    assert (stored, (await world.node.stream_state(RUN.images_stream)).num_messages) == (4, 4)


class Evaluation:
    """An evaluation of rows with images, and a node that answers."""

    def __init__(self, controller: Bus, node: Bus, settings: Settings, *, num_rows: int = 3, num_samples: int = 1):
        self.controller, self.node = controller, node
        self.rows = rows_of(num_rows)
        tasks = Tasks([("w", self.rows)])
        rows = RowImages(controller, tasks, settings, SPEC, waiter=wait_graph.CONTROLLER)
        file = settings.run.directory / "eval.jsonl"
        self.evaluator = Evaluator(controller, tasks, file=file, num_samples=num_samples, rows=rows)
        assert self.evaluator._images is not None
        self.images = self.evaluator._images

    async def run(self, version: str = "1-0") -> None:

        await self.evaluator.evaluate(Version.parse(version), due_step=0, on_result=lambda: None)

    async def answer(self, ticket: EvalTicket) -> None:
        result = EvalResult(eval_id=ticket.eval_id, index=ticket.index, sample=ticket.sample, reward=1.0)
        await self.node.publish(RUN.eval_results("w"), result)

    async def check(self, ticket: EvalTicket) -> None:
        """The image of a ticket is stored, whole, for its row in this evaluation."""
        ref, file = refs_of(self.rows[ticket.index]["image"]["bytes"])
        assert [(one.place, one.image) for one in ticket.images] == [(["image"], ref)]
        assert await self.node.images.get(RUN.eval_group(ticket.eval_id, ticket.index), ref) == file


@pytest.fixture
async def evaluation(open_role: OpenRole, settings: Settings) -> Evaluation:
    return Evaluation(await open_role(Role.CONTROLLER), await open_role(Role.NODE), settings, num_samples=2)


async def test_images_of_held_out_rows_are_there_until_all_answers_are(evaluation: Evaluation) -> None:
    node = evaluation.node
    for left in (RUN.eval_group("1-7", 0), RUN.eval_group("1-0", 9), "0-5-0"):
        await node.images.put(left, ref_of(b"x"), b"x")

    async def stored() -> list[str]:
        return await node.images.groups()

    with anyio.fail_after(PATIENCE_S):
        async with (
            node.consume(RUN.eval_stream, RUN.eval_nodes_consumer) as inbox,
            anyio.create_task_group() as evaluating,
        ):
            evaluating.start_soon(evaluation.run)
            deliveries = await fetch_all(inbox, 6)
            tickets = sorted(
                (decode(one.data, EvalTicket) for one in deliveries), key=lambda one: (one.index, one.sample)
            )
            for ticket in tickets:
                await evaluation.check(ticket)
            assert await stored() == ["0-5-0", *(RUN.eval_group("1-0", number) for number in (0, 1, 2, 9))], (
                "of an evaluation that was never whole they are gone, of this one kept"
            )
            for ticket in tickets[:3]:
                await evaluation.answer(ticket)

            async def first_is_gone() -> bool:
                return await stored() == ["0-5-0", *(RUN.eval_group("1-0", number) for number in (1, 2, 9))]

            await until(first_is_gone)
            for ticket in tickets[3:]:
                await evaluation.answer(ticket)
            for delivery in deliveries:
                await delivery.ack()

    assert await stored() == ["0-5-0"]


async def test_rows_to_evaluate_wait_for_answers_once_they_take_a_share_of_the_stream(
    evaluation: Evaluation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ticket that is lost meanwhile, as by a node that found no image, is asked again and holds up nobody."""
    node, rows = evaluation.node, evaluation.images._rows
    monkeypatch.setattr(rows, "max_row_bytes", len(refs_of(picture(0))[1]))
    tickets: list[tuple[int, int]] = []
    with anyio.fail_after(PATIENCE_S):
        async with (
            node.consume(RUN.eval_stream, RUN.eval_nodes_consumer) as inbox,
            anyio.create_task_group() as evaluating,
        ):
            evaluating.start_soon(evaluation.run)
            lost = await fetch_all(inbox, 4)
            await until(lambda: "answers, which make room" in evaluation.evaluator.waits_for)
            assert await node.images.groups() == [RUN.eval_group("1-0", number) for number in range(2)]
            for delivery in lost:
                await delivery.ack()
            while len(tickets) < 6:
                (delivery,) = await fetch_all(inbox, 1)
                ticket = decode(delivery.data, EvalTicket)
                await evaluation.check(ticket)
                await evaluation.answer(ticket)
                tickets.append((ticket.index, ticket.sample))
                await delivery.ack()

    assert tickets == [(2, 0), (2, 1), (0, 0), (0, 1), (1, 0), (1, 1)]
    assert await node.images.groups() == []


async def test_an_evaluation_after_training_takes_the_room_of_what_is_never_trained(
    evaluation: Evaluation, settings: Settings
) -> None:
    node = evaluation.node
    await fill(node, settings, share=0.9)
    with anyio.fail_after(PATIENCE_S):
        async with (
            node.consume(RUN.eval_stream, RUN.eval_nodes_consumer) as inbox,
            anyio.create_task_group() as evaluating,
        ):
            evaluating.start_soon(evaluation.run)
            await until(lambda: "room for the images of group eval-1-0-0" in evaluation.evaluator.waits_for)
            assert await node.images.groups() == ["0-99-0"], "while groups are trained, the trainer makes room"
            evaluation.evaluator.end_training()
            for delivery in await fetch_all(inbox, 6):
                await evaluation.answer(decode(delivery.data, EvalTicket))
                await delivery.ack()

    assert await node.images.groups() == []


async def test_the_schedule_says_when_training_is_over(open_role: OpenRole, settings: Settings, world: World) -> None:
    bus = await open_role(Role.CONTROLLER)
    evaluation = Evaluation(bus, world.node, settings, num_rows=1)
    controller = controller_of(bus, settings, rows_of(5), evaluation.evaluator)
    await world.hold("1-1")
    names = world.node.names
    with anyio.fail_after(PATIENCE_S):
        async with world.node.consume(names.eval_stream, names.eval_nodes_consumer) as inbox, running(controller):
            for version, final in (("1-1", False), ("1-2", True)):
                await world.hold(version, final=final)
                (delivery,) = await fetch_all(inbox, 1)
                assert evaluation.images.is_training_over is final
                await evaluation.answer(decode(delivery.data, EvalTicket))
                await delivery.ack()


async def test_a_trainer_removes_images_of_groups_that_are_over_and_of_no_evaluation(
    open_role: OpenRole, settings: Settings
) -> None:
    trainer, node = await open_role(Role.TRAINER), await open_role(Role.NODE)
    planner = BatchPlanner[Any](settings, Journal(), lineage=1)
    planner.note_recorded([Outcome(group_id="0-0-0", kind=OutcomeKind.FAILED, lineage=1)])
    for group_id in ("0-0-0", "0-1-0", RUN.eval_group("1-0", 0)):
        await node.images.put(group_id, ref_of(b"x"), b"x")

    sweep = ImageSweep(trainer, is_over=planner.is_over, has_nothing=lambda: planner.has_nothing, is_newest=is_newest)
    await sweep.sweep()

    assert await node.images.groups() == ["0-1-0", RUN.eval_group("1-0", 0)]
