"""An arm becomes what is meant, no answer has two versions, and none is lost to a move, whatever comes when."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from areal_async.cli.serve import check_gpus
from areal_async.doctor.preflight.machine import Gpu
from areal_async.errors import UserError
from areal_async.process import host
from areal_async.serving.arms import Arm
from areal_async.serving.gpus import gpus_taken, sharing, starts_beside
from areal_async.serving.server import check_files
from areal_async.serving.split import Share
from tests.brokers import until
from tests.unit.serving.scripted import Stage, place_of, settings_of

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops]

BOTH = pytest.mark.parametrize("replace", ["beside", "in_place"])


@asynccontextmanager
async def followed(stage: Stage, directory: Path, **serve: Any) -> AsyncIterator[Arm]:
    """An arm that follows its name."""
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            arm = Arm(Share("champion", 1.0), place_of(stage, settings_of(**serve), directory), tasks)
            await arm.start()
            tasks.start_soon(arm.run)
            yield arm
            tasks.cancel_scope.cancel()


async def answer(arm: Arm, *, until: anyio.Event) -> tuple[str, str]:
    """Return the version at the beginning of an answer, and at its end."""
    async with arm.answering() as served:
        before = served.version
        await until.wait()
        return before, served.version


async def wait_for(arm: Arm, version: str) -> None:
    await until(lambda: arm.version == version)


@BOTH
async def test_answers_that_have_begun_end_on_their_version_however_often_the_name_moves(
    replace: str, tmp_path: Path
) -> None:
    stage = Stage({"champion": "1-0"})
    ends = [anyio.Event() for _ in range(6)]
    seen: list[tuple[str, str]] = []

    async def ask(number: int) -> None:
        seen.append(await answer(arm, until=ends[number]))

    async with followed(stage, tmp_path, replace=replace) as arm, anyio.create_task_group() as asking:
        for number in range(6):
            asking.start_soon(ask, number)
            await checkpoint()
            stage.meant["champion"] = f"1-{number + 1}"
            if number:
                ends[number - 1].set()  # the one before; this one goes on through the move
            if replace == "in_place":
                ends[number].set()  # it waits for that
            await wait_for(arm, f"1-{number + 1}")
        ends[5].set()

    assert sorted(seen) == [(f"1-{number}", f"1-{number}") for number in range(6)]
    assert stage.running == []
    assert stage.held_folders == []


async def test_servers_of_the_old_version_run_until_their_last_answer_and_there_is_one_fleet_more_at_the_most(
    tmp_path: Path,
) -> None:
    stage, end = Stage({"champion": "1-1"}), anyio.Event()
    async with followed(stage, tmp_path) as arm, anyio.create_task_group() as asking:
        asking.start_soon(lambda: answer(arm, until=end))
        await checkpoint()
        stage.meant["champion"] = "1-2"
        await wait_for(arm, "1-2")
        stage.meant["champion"] = "1-3"
        await anyio.sleep(0.05)
        assert (arm.version, stage.running, stage.held_folders) == ("1-2", ["1-1", "1-2"], ["1-1", "1-2"])

        end.set()
        await wait_for(arm, "1-3")
        await until(lambda: len(stage.running) == 1)

        assert (stage.running, stage.held_folders) == (["1-3"], ["1-3"])


async def test_a_name_that_comes_back_does_not_wait_for_the_place_of_another_version(tmp_path: Path) -> None:
    stage, end = Stage({"champion": "1-1"}), anyio.Event()
    async with followed(stage, tmp_path) as arm, anyio.create_task_group() as asking:
        asking.start_soon(lambda: answer(arm, until=end))
        await checkpoint()
        stage.meant["champion"] = "1-2"
        await wait_for(arm, "1-2")
        stage.meant["champion"] = "1-3"
        await anyio.sleep(0.05)
        stage.meant["champion"] = "1-1"
        await wait_for(arm, "1-1")
        end.set()

    assert "1-3" not in stage.num_starts


async def test_a_name_that_comes_back_finds_servers_that_have_not_left(tmp_path: Path) -> None:
    """A rollback need not wait for servers, nor for an answer that takes long."""
    stage, end = Stage({"champion": "1-1"}), anyio.Event()
    async with followed(stage, tmp_path) as arm, anyio.create_task_group() as asking:
        asking.start_soon(lambda: answer(arm, until=end))
        await checkpoint()
        for version in ("1-2", "1-1"):
            stage.meant["champion"] = version
            await wait_for(arm, version)
        await until(lambda: stage.running == ["1-1"])
        end.set()
        await anyio.sleep(0.01)

        assert stage.running == ["1-1"], "it answers, and is not seen off once its answers have ended"
        assert stage.num_starts == {"1-1": 1, "1-2": 1}


async def test_in_place_no_answer_begins_while_weights_change_and_each_that_waits_gets_the_new_ones(
    tmp_path: Path,
) -> None:
    stage, end = Stage({"champion": "1-1"}), anyio.Event()
    seen: list[tuple[str, str]] = []

    async def ask() -> None:
        seen.append(await answer(arm, until=end))

    async with followed(stage, tmp_path, replace="in_place") as arm, anyio.create_task_group() as asking:
        asking.start_soon(ask)
        await checkpoint()
        stage.meant["champion"] = "1-2"
        await until(lambda: stage.held_folders == ["1-1", "1-2"])
        await anyio.sleep(0.01)
        asking.start_soon(ask)
        await checkpoint()
        assert (arm.version, arm.is_ready, len(seen)) == ("1-1", True, 0)
        end.set()
        await wait_for(arm, "1-2")
        assert stage.held_folders == ["1-1", "1-2"], "servers start with the first, and hold the second"
        stage.meant["champion"] = "1-3"
        await wait_for(arm, "1-3")
        assert stage.held_folders == ["1-1", "1-3"]

    assert sorted(seen) == [("1-1", "1-1"), ("1-2", "1-2")]
    assert stage.num_starts == {"1-1": 1}


@BOTH
async def test_a_version_that_cannot_be_had_leaves_the_old_one_and_is_tried_again(replace: str, tmp_path: Path) -> None:
    stage = Stage({"champion": "1-1"}, broken={"1-2"})
    async with followed(stage, tmp_path, replace=replace) as arm:
        stage.meant["champion"] = "1-2"
        await stage.wait_told("version 1-1 goes on")
        await anyio.sleep(0.1)
        assert arm.is_ready
        stage.broken.clear()
        await wait_for(arm, "1-2")

        del stage.meant["champion"]
        await stage.wait_told("version 1-2 goes on: no version champion")
        stage.meant["champion"] = "1-3"
        await wait_for(arm, "1-3")

    assert len(stage.told) == len(set(stage.told)), "each is said once"


async def test_a_disk_that_fails_leaves_the_version_and_is_looked_at_again(tmp_path: Path) -> None:
    stage = Stage({"champion": "1-1"})
    async with followed(stage, tmp_path) as arm:
        stage.fault = OSError(5, "Input/output error")
        await stage.wait_told("version 1-1 goes on: [Errno 5] Input/output error")
        assert arm.is_ready
        stage.fault, stage.meant["champion"] = None, "1-2"
        await wait_for(arm, "1-2")


async def test_what_is_done_before_a_version_answers_is_told(tmp_path: Path) -> None:
    stage = Stage({"champion": "1-1"})
    async with followed(stage, tmp_path):
        pass

    assert [text.partition(",")[0] for text in stage.told] == [
        "champion: version 1-1: its weights are made ready",
        "champion: version 1-1: its servers start",
        "champion: version 1-1 answers",
    ]


async def test_a_name_that_means_nothing_ends_the_start(tmp_path: Path) -> None:
    async with anyio.create_task_group() as tasks:
        arm = Arm(Share("none", 1.0), place_of(Stage({}), settings_of(), tmp_path), tasks)
        with pytest.raises(UserError, match="no version none"):
            await arm.start()


async def test_a_version_that_is_starting_when_another_is_meant_is_followed_by_that(tmp_path: Path) -> None:
    stage = Stage({"champion": "1-1"}, slow={"1-2": anyio.Event()})
    async with followed(stage, tmp_path) as arm:
        stage.meant["champion"] = "1-2"
        await until(lambda: stage.num_starts["1-2"] > 0)
        stage.meant["champion"] = "1-3"
        stage.slow["1-2"].set()
        await wait_for(arm, "1-3")


@pytest.mark.parametrize(
    ("gpus", "replace", "num_arms", "is_beside"),
    [
        ((), "auto", 3, True),
        (("0", "1"), "auto", 1, True),
        (("0", "1"), "auto", 2, False),
        (("0",), "beside", 1, True),
        ((), "in_place", 1, False),
    ],
)
def test_new_servers_start_beside_where_there_is_room(
    gpus: tuple[str, ...], replace: str, num_arms: int, is_beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(gpus))
    assert host.visible_gpus() == gpus

    assert starts_beside(settings_of(replace=replace), num_arms=num_arms) == is_beside


def test_gpus_that_others_use_are_refused_or_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1,0")
    gpus = [Gpu("card", 80, free_bytes=free, number=number) for number, free in {"0": 79, "1": 79, "3": 20}.items()]
    auto, set_by_hand = settings_of(), settings_of(replace="beside")

    assert list(gpus_taken(auto, num_arms=1)) == ["3", "1"]
    with pytest.raises(UserError, match=r"got GPU 3 with memory .* need 2 that .* \(free here: 0, 1\)"):
        check_gpus(auto, num_arms=1, gpus=gpus)
    assert "got GPU 3 with memory" in check_gpus(set_by_hand, num_arms=1, gpus=gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0,3")
    assert check_gpus(auto, num_arms=1, gpus=gpus) == ""


def test_fleets_that_share_gpus_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")

    assert "fleets share GPUs, 2 where they need 3" in sharing(settings_of(replace="beside"), num_arms=2)
    assert sharing(settings_of(replace="in_place"), num_arms=2) == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert sharing(settings_of(replace="beside"), num_arms=2) == ""


def test_too_few_gpus_for_the_arms_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")

    with pytest.raises(UserError, match="got 1 GPUs, need 2, 1 for each arm"):
        starts_beside(settings_of(), num_arms=2)


def test_more_requests_than_a_process_may_have_connections_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a connection would be closed where status 429 was promised."""
    given: list[tuple[int, int]] = []
    monkeypatch.setattr("resource.getrlimit", lambda kind: given[-1] if given else (512, 4096))
    monkeypatch.setattr("resource.setrlimit", lambda kind, limits: given.append(limits))

    assert check_files(1024).max_connections == 2048
    with pytest.raises(UserError, match=r"serve\.max_requests: got 1025 .* 4096 files, need 1024 at most"):
        check_files(1025)
