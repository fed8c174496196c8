"""A swap checks the files first, continues whatever happens, and believes only what the server says afterwards."""

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from areal_async.inference.faults import ServerFault, StagingFault
from areal_async.inference.http import ServerApi, make_client
from areal_async.inference.swap import Staging, swap
from areal_async.types import WeightsVersion
from tests.fakes.fake_sglang import FakeSglang

pytestmark = pytest.mark.anyio

TARGET = WeightsVersion(version="1-7", path="/weights/1-7")


@asynccontextmanager
async def api_of(server: FakeSglang) -> AsyncIterator[ServerApi]:
    async with server, make_client(max_connections=4) as http:
        yield ServerApi(http, server.url)


@pytest.mark.parametrize(("mode", "flush_cache"), [("retract", True), ("in_place", False), ("abort", True)])
async def test_server_is_paused_updated_and_continued_in_this_order(mode: str, flush_cache: bool) -> None:
    server = FakeSglang()
    async with api_of(server) as api:
        times = await swap(api, TARGET, mode=mode, deadline_s=5)

    assert server.calls == [
        ("/pause_generation", {"mode": mode}),
        (
            "/update_weights_from_disk",
            {"model_path": "/weights/1-7", "weight_version": "1-7", "flush_cache": flush_cache},
        ),
        ("/continue_generation", {}),
        ("/model_info", {}),
    ]
    assert min(times) >= 0


@pytest.mark.parametrize(
    "answer",
    [(400, {"success": False, "message": "shape mismatch"}), (200, {"success": False, "message": "shape mismatch"})],
)
async def test_server_that_refuses_the_update_is_continued_all_the_same(answer: tuple[int, dict[str, object]]) -> None:
    server = FakeSglang()
    server.failing["/update_weights_from_disk"] = answer
    async with api_of(server) as api:
        with pytest.raises(ServerFault, match="shape mismatch"):
            await swap(api, TARGET, mode="retract", deadline_s=5)

    assert [route for route, _ in server.calls] == ["/pause_generation", "/continue_generation"]


async def test_server_that_goes_on_with_other_weights_than_told_is_at_fault() -> None:
    server = FakeSglang()
    server.failing["/update_weights_from_disk"] = (200, {"success": True})
    async with api_of(server) as api:
        with pytest.raises(ServerFault, match="got version '1-0', need 1-7"):
            await swap(api, TARGET, mode="retract", deadline_s=5)


async def test_server_that_cannot_be_reached_is_at_fault_and_not_healthy() -> None:
    server = FakeSglang()
    async with api_of(server) as api:
        assert await api.is_healthy(deadline_s=5)
        api.url = "http://127.0.0.1:9"
        assert not await api.is_healthy(deadline_s=5)
        with pytest.raises(ServerFault, match="/model_info"):
            await api.weight_version(deadline_s=5)


def version_in(folder: Path, content: bytes, announced: bytes) -> WeightsVersion:
    (folder / "model.safetensors").write_bytes(content)
    return WeightsVersion(
        version="1-1", path=str(folder), sha256={"model.safetensors": hashlib.sha256(announced).hexdigest()}
    )


async def test_files_are_read_once_for_all_servers(tmp_path: Path) -> None:
    staging = Staging()
    target = version_in(tmp_path, b"weights", b"weights")
    await staging.check(target)
    (tmp_path / "model.safetensors").unlink()

    await staging.check(target)

    with pytest.raises(StagingFault, match="No such file"):
        await Staging().check(target)


async def test_file_that_differs_from_what_was_announced_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StagingFault, match="weights 1-1: .*model.safetensors has hash"):
        await Staging().check(version_in(tmp_path, b"other", b"weights"))
