"""A swap checks the files first, believes only what the server says, and continues none whose update failed."""

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from areal_async.inference.faults import ServerFault, StagingFault
from areal_async.inference.http import ServerApi, make_client
from areal_async.inference.supervision.swap import Staging, abandon, swap, swap_by_broadcast
from areal_async.protocol.types import TensorSpec, UpdateGroup, WeightsVersion
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
        times = await swap(api, TARGET, mode=mode, deadline_s=60)

    assert server.calls == [
        ("/pause_generation", {"mode": mode}),
        (
            "/update_weights_from_disk",
            {"model_path": "/weights/1-7", "weight_version": "1-7", "flush_cache": flush_cache},
        ),
        ("/model_info", {}),
        ("/continue_generation", {}),
    ]
    assert min(times) >= 0


@pytest.mark.parametrize(
    "answer",
    [(400, {"success": False, "message": "shape mismatch"}), (200, {"success": False, "message": "shape mismatch"})],
)
async def test_server_that_refuses_the_update_stays_paused(answer: tuple[int, dict[str, object]]) -> None:
    server = FakeSglang()
    server.failing["/update_weights_from_disk"] = answer
    async with api_of(server) as api:
        with pytest.raises(ServerFault, match="shape mismatch"):
            await swap(api, TARGET, mode="retract", deadline_s=60)

    assert [route for route, _ in server.calls] == ["/pause_generation"]


async def test_server_that_ends_up_with_other_weights_than_told_is_at_fault() -> None:
    server = FakeSglang()
    server.failing["/update_weights_from_disk"] = (200, {"success": True})
    async with api_of(server) as api:
        with pytest.raises(ServerFault, match="got version '1-0', need 1-7"):
            await swap(api, TARGET, mode="retract", deadline_s=60)

    assert server.is_paused


BUCKETS = [
    [TensorSpec(name="a", dtype="float32", shape=[2, 3]), TensorSpec(name="b", dtype="bfloat16", shape=[4])],
    [TensorSpec(name="c", dtype="float32", shape=[1])],
]
GROUP = UpdateGroup(name="g1", address="127.0.0.1", port=1, backend="gloo", size=2, ranks={"s0": 1})
BROADCAST = WeightsVersion(version="1-7", kind="distributed", group=GROUP, buckets=BUCKETS)


@pytest.mark.parametrize(("mode", "flush_cache"), [("retract", True), ("in_place", False)])
async def test_broadcast_is_received_in_one_session_and_named_with_its_last_bucket(
    mode: str, flush_cache: bool
) -> None:
    server = FakeSglang()
    async with api_of(server) as api:
        await swap_by_broadcast(api, BROADCAST, mode=mode, deadline_s=60)

    route = "/update_weights_from_distributed"
    fixed = {"group_name": "g1", "load_format": "flattened_bucket"}
    first = {"names": ["a", "b"], "dtypes": ["float32", "bfloat16"], "shapes": [[2, 3], [4]]}
    last = {"names": ["c"], "dtypes": ["float32"], "shapes": [[1]]}
    assert server.calls == [
        ("/pause_generation", {"mode": mode}),
        ("/begin_weight_update", {}),
        (route, {**fixed, **first, "flush_cache": False, "weight_version": None}),
        (route, {**fixed, **last, "flush_cache": flush_cache, "weight_version": "1-7"}),
        ("/end_weight_update", {}),
        ("/model_info", {}),
        ("/continue_generation", {}),
    ]


async def test_broadcast_that_does_not_end_is_given_up_at_its_deadline_with_the_server_paused() -> None:
    server = FakeSglang()
    server.silent.add("/update_weights_from_distributed")
    async with api_of(server) as api:
        with pytest.raises(ServerFault, match=r"not over within inference.transfer_deadline_s = 0.2 s"):
            await swap_by_broadcast(api, BROADCAST, mode="retract", deadline_s=0.2)

    assert server.is_paused


async def test_server_that_knows_of_no_session_and_no_group_is_abandoned_all_the_same() -> None:
    server = FakeSglang()
    server.failing["/end_weight_update"] = server.failing["/destroy_weights_update_group"] = (400, {"success": False})
    async with api_of(server) as api:
        await abandon(api, "g1")

    assert server.calls == [("/abort_request", {"abort_all": True})]


async def test_server_that_cannot_be_reached_is_at_fault_and_not_healthy() -> None:
    server = FakeSglang()
    async with api_of(server) as api:
        assert await api.is_healthy(deadline_s=60)
        api.url = "http://127.0.0.1:9"
        assert not await api.is_healthy(deadline_s=60)
        with pytest.raises(ServerFault, match="/model_info"):
            await api.weight_version(deadline_s=60)


def version_in(folder: Path, content: bytes, announced: bytes) -> WeightsVersion:
    (folder / "model.safetensors").write_bytes(content)
    return WeightsVersion(
        version="1-1", path=str(folder), sha256={"model.safetensors": hashlib.sha256(announced).hexdigest()}
    )


async def test_files_are_read_once_for_all_servers(tmp_path: Path) -> None:
    staging = Staging()
    target = version_in(tmp_path, b"weights", b"weights")
    await staging.stage(target)
    (tmp_path / "model.safetensors").unlink()

    await staging.stage(target)

    staging.forget()
    with pytest.raises(StagingFault, match="No such file"):
        await staging.stage(target)


async def test_file_that_differs_from_what_was_announced_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StagingFault, match="weights 1-1: .*model.safetensors has hash"):
        await Staging().stage(version_in(tmp_path, b"other", b"weights"))
