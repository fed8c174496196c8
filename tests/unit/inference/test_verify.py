"""A server is taken back only when it names the announced version and shows the tensors that belong to it."""

import hashlib

import pytest

from areal_async.inference.faults import ServerFault
from areal_async.inference.http import Checksums, ServerApi, make_client
from areal_async.inference.supervision.verify import Verifier, compare
from areal_async.protocol.types import WeightsVersion
from tests.fakes.fake_sglang import FakeSglang

NORM, DOWN = hashlib.sha256(b"norm").hexdigest(), hashlib.sha256(b"down").hexdigest()
TARGET = WeightsVersion(
    version="1-5", path="/w", tensors_sha256={"model.norm.weight": NORM, "model.layers.0.mlp.down_proj.weight": DOWN}
)


def of_ranks(*ranks: dict[str, str]) -> Checksums:
    return Checksums(list(ranks), "whole")


@pytest.mark.parametrize("num_digits", [16, 64])
def test_hashes_of_tensors_known_to_both_sides_agree_as_far_as_they_are_shown(num_digits: int) -> None:
    compare(of_ranks({"model.norm.weight": NORM[:num_digits], "model.layers.0.qkv_proj.weight": "fused"}), TARGET)


@pytest.mark.parametrize("shown", [DOWN[:16], ""])
def test_tensor_that_differs_is_named(shown: str) -> None:
    with pytest.raises(ServerFault, match=rf"tensor model.norm.weight has checksum '{shown}', need {NORM}"):
        compare(of_ranks({"model.norm.weight": shown}), TARGET)


def test_server_that_shows_none_of_the_announced_tensors_proves_nothing() -> None:
    with pytest.raises(ServerFault, match="checksums of none of the announced tensors"):
        compare(of_ranks({"lm_head.weight": NORM}), TARGET)


def test_of_several_ranks_only_what_is_whole_on_each_is_compared_and_on_every_one() -> None:
    part = {"model.norm.weight": NORM[:16], "model.layers.0.mlp.down_proj.weight": "a part of it"}
    compare(of_ranks(part, part), TARGET)
    with pytest.raises(ServerFault, match="model.norm.weight"):
        compare(of_ranks(part, {"model.norm.weight": DOWN[:16]}), TARGET)


@pytest.mark.anyio
@pytest.mark.parametrize("has_sha256", [True, False])
async def test_server_is_asked_for_its_version_and_its_tensors(has_sha256: bool) -> None:
    verifier = Verifier(has_sha256=has_sha256)
    first, second = FakeSglang(version="1-5"), FakeSglang(version="1-5")
    first.checksums = {"model.norm.weight": NORM[:16]}
    second.checksums = {"model.norm.weight": DOWN[:16]}
    async with first, second, make_client(max_connections=2) as http:
        await verifier.check(ServerApi(http, first.url), TARGET)
        with pytest.raises(ServerFault, match="checksum"):
            await verifier.check(ServerApi(http, second.url), TARGET)
        second.checksums = first.checksums
        await verifier.check(ServerApi(http, second.url), TARGET)
        second.version = "1-4"
        with pytest.raises(ServerFault, match="got version '1-4', need 1-5"):
            await verifier.check(ServerApi(http, second.url), TARGET)


@pytest.mark.anyio
async def test_version_announced_without_hashes_is_believed_by_its_name() -> None:
    server = FakeSglang(version="1-5")
    async with server, make_client(max_connections=2) as http:
        await Verifier(has_sha256=True).check(ServerApi(http, server.url), WeightsVersion(version="1-5", path="/w"))

    assert [route for route, _ in server.calls] == ["/model_info"]
