"""The controller's process, told to end: by the signal, and with nothing left of what it has recorded."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import pytest

from areal_async.bus import EmbeddedBroker, Role, declare, open_bus
from areal_async.bus.permissions import Permissions, permissions
from areal_async.config.settings import (
    BusSettings,
    DatasetSettings,
    EvalSettings,
    MetricsSettings,
    ModelSettings,
    RolloutSettings,
    RunSettings,
    Settings,
    TaskSettings,
)
from areal_async.launch.run_directory import RunDirectory
from areal_async.protocol.subjects import Names
from areal_async.protocol.types import CutKind
from areal_async.vision.images import take_image
from areal_async.vision.spec import VisionSpec
from tests.brokers import OpenRole, running_broker, until
from tests.bus.test_controller import World
from tests.unit.vision.pictures import encoded, noise
from tests.unit.vision.specs import QWEN3, config_of, write_folder

pytestmark = pytest.mark.anyio


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": str(index)}) + "\n" for index in range(5)))
    return Settings(
        run=RunSettings(name="test", directory=tmp_path, steps=2),
        tasks=(TaskSettings(workflow="w.py", dataset=DatasetSettings(path=str(rows))),),
        rollout=RolloutSettings(group_size=2, min_group_size=1, batch_groups=2, max_staleness=1),
        eval=EvalSettings(every_steps=0),
        metrics=MetricsSettings(traces="file"),
        bus=BusSettings(operation_deadline_s=60.0, max_disk_bytes=8 << 30),
    )


async def test_sigterm_ends_it_by_that_signal_after_its_spans_are_written(
    broker: EmbeddedBroker, open_role: OpenRole, settings: Settings
) -> None:
    """Not with status 0, which would say that the run has finished."""
    world = World(await open_role(Role.NODE), await open_role(Role.TRAINER))
    await world.cut(CutKind.BEGIN, 0)
    await world.hold("1-0")
    directory = RunDirectory(settings.run_directory)
    directory.write_settings(settings)
    directory.write_bus_url(broker.url)
    command = [sys.executable, "-m", "areal_async", "controller", "--run-directory", str(directory.path)]

    async def has_admitted() -> bool:
        return len(await world.all_tickets()) >= 4

    async with await anyio.open_process(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        await until(has_admitted, within_s=120.0)
        process.send_signal(signal.SIGTERM)
        assert await process.wait() == -signal.SIGTERM

    keys = await world.node.keys("server.")
    assert keys == [settings.names.server_key("s")], "its try of the broker's permissions leaves nothing"
    lines = (directory.path / "traces" / "controller-0.jsonl").read_text().splitlines()
    spans = [span for line in lines for span in json.loads(line)["resourceSpans"][0]["scopeSpans"][0]["spans"]]
    assert [one["name"] for one in spans].count("admit w") == len(await world.all_tickets())


async def test_rows_with_images_are_taken_in_as_the_runs_model_sees(
    broker: EmbeddedBroker, open_role: OpenRole, settings: Settings, tmp_path: Path
) -> None:
    """It needs the model's small files alone."""
    import datasets

    picture = noise(64, 64)
    features = datasets.Features({"image": datasets.Image()})
    datasets.Dataset.from_list([{"image": encoded(picture)}] * 5, features=features).to_parquet(
        tmp_path / "rows.parquet"
    )
    processor = {**QWEN3, "size": {"shortest_edge": 64 * 64, "longest_edge": 256 * 256}}
    model = write_folder(tmp_path / "model", config_of("qwen3_vl", processor), processor)
    task = TaskSettings(workflow="w.py", dataset=DatasetSettings(path=str(tmp_path / "rows.parquet")))
    seeing = settings.model_copy(update={"tasks": (task,), "model": ModelSettings(path=str(model))})
    world = World(await open_role(Role.NODE), await open_role(Role.TRAINER))
    await world.cut(CutKind.BEGIN, 0)
    await world.hold("1-0")
    directory = RunDirectory(seeing.run_directory)
    directory.write_settings(seeing)
    directory.write_bus_url(broker.url)
    command = [sys.executable, "-m", "areal_async", "controller", "--run-directory", str(directory.path)]

    async def has_admitted() -> bool:
        return len(await world.all_tickets()) >= 4

    async with await anyio.open_process(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        await until(has_admitted, within_s=120.0)
        process.send_signal(signal.SIGTERM)
        await process.wait()

    spec = VisionSpec.read(model)
    assert spec is not None
    for ticket in await world.all_tickets():
        (one,) = ticket.images
        assert (ticket.row, one.place, one.reason) == ({"image": None}, ["image"], "")
        assert one.image is not None
        assert await world.node.images.get(ticket.group_id, one.image) == take_image(picture, spec).data


async def test_rows_in_another_order_end_it_before_it_admits_any_of_them(
    broker: EmbeddedBroker, settings: Settings
) -> None:
    directory = RunDirectory(settings.run_directory)
    directory.write_settings(settings)
    directory.write_bus_url(broker.url)
    command = [sys.executable, "-m", "areal_async", "controller", "--run-directory", str(directory.path)]
    source = settings.tasks[0].dataset.path
    assert source is not None

    async with await anyio.open_process(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        await until((directory.path / "rows.json").is_file, within_s=120.0)
        process.send_signal(signal.SIGKILL)
        await process.wait()
    _swap_first_lines(Path(source))
    with anyio.fail_after(120.0):
        ended = await anyio.run_process(command, check=False)

    assert ended.returncode == 2
    assert b"run test: tasks.0.dataset: got 5 rows with SHA-256" in ended.stderr
    assert b"Traceback" not in ended.stderr


async def test_a_broker_at_which_no_lost_nodes_server_could_be_disowned_is_refused_at_the_start(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All would wait for its weights without end, and admission with them."""

    def older(role: Role, names: Names) -> Permissions:
        now = permissions(role, names)
        return Permissions(tuple(one for one in now.publish if not one.endswith(".server.>")), now.subscribe)

    monkeypatch.setattr("areal_async.bus.accounts.permissions", older)
    directory = RunDirectory(settings.run_directory)
    async with running_broker(settings) as broker:
        directory.write_settings(settings)
        directory.write_bus_url(broker.url)
        key = broker.credentials(Role.OPERATOR)
        async with open_bus(broker.url, names=settings.names, role=Role.OPERATOR, credentials=key) as operator:
            await declare(operator, settings)
        command = [sys.executable, "-m", "areal_async", "controller", "--run-directory", str(directory.path)]
        with anyio.fail_after(120.0):
            ended = await anyio.run_process(command, check=False)

    assert ended.returncode == 2
    assert b"server.nobody: denied to the role controller, need it to take back" in ended.stderr


def _swap_first_lines(file: Path) -> None:
    first, second, *others = file.read_text().splitlines(keepends=True)
    file.write_text("".join([second, first, *others]))
