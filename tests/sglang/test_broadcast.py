"""What both servers promise of weights that a trainer broadcasts. The tests are the trainer and supervisor at once."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from safetensors.torch import load_file

from areal_async.inference.weight_group import describe
from areal_async.protocol.types import TensorSpec
from tests.unit.inference.broadcasting import Trainer, assert_success
from tests.unit.inference.embedded_engine import Server, prompt_of, reference_logprobs

pytestmark = pytest.mark.timeout(900)  # of which the server's start takes most, once

TOLERANCE = 1e-4
LONG = 450
"""Tokens of an answer that is still running when a test has seen its first chunks."""


@pytest.fixture
def trainer(server: Server) -> Iterator[Trainer]:
    trainer = Trainer(server, "run-1-1")
    trainer.join()
    yield trainer
    trainer.close()


def assert_refused(answer: httpx.Response, message: str) -> None:
    assert answer.status_code == 400
    assert answer.json()["success"] is False
    assert message in answer.json()["message"]


def assert_scored_by(model: Path, prompt: list[int], ids: list[int], logprobs: list[float], span: slice) -> None:
    expected = reference_logprobs(model, prompt, ids)
    torch.testing.assert_close(torch.tensor(logprobs[span]), torch.tensor(expected[span]), atol=TOLERANCE, rtol=0.0)


def assert_serves(server: Server, model: Path, version: str) -> None:
    """A new answer is scored by the model and stamped with its version; the tensors are the files'."""
    prompt = prompt_of(12, seed=3)
    answer = server.generate(prompt, max_new_tokens=30)
    meta = answer["meta_info"]
    logprobs = [entry[0] for entry in meta["output_token_logprobs"]]

    assert server.http.get("/model_info").json()["weight_version"] == version
    assert meta["weight_versions"] == [{"version": version, "start": 0, "end": 30}]
    assert_scored_by(model, prompt, answer["output_ids"], logprobs, slice(None))
    assert_checksums_of(server, model)


def checksums(server: Server) -> dict[str, str]:
    found: dict[str, str] = server.post("/weights_checker", action="checksum").json()["ranks"][0]["checksums"]
    return found


def assert_checksums_of(server: Server, model: Path) -> None:
    """Where a tensor is served as it is stored, the checksum begins like the SHA-256 of its bytes.

    SGLang joins query, key and value, gate and up, and pads the embedding to a multiple of 64 rows.
    """
    served = checksums(server)
    stored = {
        name: hashlib.sha256(tensor.flatten().view(torch.uint8).numpy().data).hexdigest()
        for name, tensor in load_file(model / "model.safetensors").items()
    }
    whole = {name for name in stored if any(part in name for part in ("norm", "o_proj", "down_proj"))}
    assert whole
    assert {name: served[name][:16] for name in whole} == {name: stored[name][:16] for name in whole}


def test_after_a_retracting_broadcast_the_stream_goes_on_under_the_new_weights(
    trainer: Trainer, models: list[Path]
) -> None:
    server, prompt = trainer.server, prompt_of(10)
    with server.stream(prompt, max_new_tokens=LONG) as stream:
        stream.read(3)
        server.post("/pause_generation", mode="retract")
        trainer.send(models[1], "0-1")
        server.post("/continue_generation")
        stream.read()

    old, new = stream.meta["weight_versions"]
    assert (old["version"], new["version"]) == ("0-0", "0-1")
    assert (old["start"], new["start"], new["end"]) == (0, old["end"], LONG)
    assert 0 < old["end"] < LONG
    assert_scored_by(models[0], prompt, stream.output_ids, stream.logprobs, slice(0, old["end"]))
    assert_scored_by(models[1], prompt, stream.output_ids, stream.logprobs, slice(new["start"], LONG))
    assert_serves(server, models[1], "0-1")


def test_an_in_place_broadcast_keeps_the_stream_running(trainer: Trainer, models: list[Path]) -> None:
    server, prompt = trainer.server, prompt_of(10)
    with server.stream(prompt, max_new_tokens=LONG) as stream:
        stream.read(3)
        server.post("/pause_generation", mode="in_place")
        trainer.send(models[1], "0-1", flush_cache=False)
        server.post("/continue_generation")
        stream.read()

    old, new = stream.meta["weight_versions"]
    assert (old["version"], new["version"], new["end"]) == ("0-0", "0-1", LONG)
    assert stream.meta["num_retractions"] == 0
    assert_scored_by(models[0], prompt, stream.output_ids, stream.logprobs, slice(0, old["end"]))
    server.post("/flush_cache")
    assert_serves(server, models[1], "0-1")


def test_an_in_place_bucket_that_asks_to_flush_says_it_could_not(trainer: Trainer, models: list[Path]) -> None:
    server = trainer.server
    with server.stream(prompt_of(10), max_new_tokens=LONG) as stream:
        stream.read(1)
        server.post("/pause_generation", mode="in_place")
        server.post("/begin_weight_update")
        answer = trainer.send_bucket(load_file(models[1] / "model.safetensors"), weight_version="0-1")
        server.post("/continue_generation")

    assert_refused(answer, "not flushed")


def test_an_aborting_pause_ends_streams_before_the_broadcast(trainer: Trainer, models: list[Path]) -> None:
    server = trainer.server
    with server.stream(prompt_of(10), max_new_tokens=LONG) as stream:
        stream.read(3)
        server.post("/pause_generation", mode="abort")
        stream.read()
        trainer.send(models[1], "0-1")
        server.post("/continue_generation")

    assert stream.meta["finish_reason"]["type"] == "abort"
    assert stream.meta["weight_version"] == "0-0"
    assert_serves(server, models[1], "0-1")


def test_a_broadcast_without_a_pause_lets_running_answers_finish_first(trainer: Trainer, models: list[Path]) -> None:
    """It does not ask to flush: SGLang may not have forgotten the answer yet that it has just finished."""
    server, tensors = trainer.server, load_file(models[1] / "model.safetensors")
    server.post("/begin_weight_update")
    with server.stream(prompt_of(5), max_new_tokens=100) as stream:
        stream.read(1)
        answer = trainer.send_bucket(tensors, weight_version="0-1", flush_cache=False)
        stream.read()
    server.post("/end_weight_update")
    server.wait_idle()

    assert answer.json() == {
        "success": True,
        "message": "Succeeded to update parameter online. Weight version updated to 0-1.",
    }
    assert stream.meta["weight_versions"] == [{"version": "0-0", "start": 0, "end": 100}]
    assert_serves(server, models[1], "0-1")


def test_tensors_may_be_broadcast_one_by_one(trainer: Trainer, models: list[Path]) -> None:
    server, tensors = trainer.server, load_file(models[1] / "model.safetensors")
    server.post("/pause_generation", mode="retract")
    server.post("/begin_weight_update")
    specs = [describe(name, tensor) for name, tensor in tensors.items()]
    answer = trainer.order_bucket(specs, load_format=None, weight_version="0-1")
    for tensor in tensors.values():
        trainer.group.broadcast(tensor)

    assert_success(answer.result())
    server.post("/end_weight_update")
    server.post("/continue_generation")
    assert_serves(server, models[1], "0-1")


def test_a_group_carries_version_after_version(trainer: Trainer, models: list[Path]) -> None:
    server = trainer.server
    for model, version in ((models[1], "0-1"), (models[0], "0-2"), (models[1], "0-3")):
        server.post("/pause_generation", mode="retract")
        trainer.send(model, version)
        server.post("/continue_generation")

        assert_serves(server, model, version)


def test_a_server_leaves_a_group_and_joins_another(trainer: Trainer, models: list[Path]) -> None:
    server = trainer.server
    trainer.group.close()
    assert_success(server.post("/destroy_weights_update_group", group_name="run-1-1"))
    assert_refused(server.post("/destroy_weights_update_group", group_name="run-1-1"), "does not exist")
    other = Trainer(server, "run-1-2")
    other.join()
    server.post("/pause_generation", mode="retract")
    other.send(models[1], "0-1")
    server.post("/continue_generation")
    other.close()

    assert_serves(server, models[1], "0-1")


def test_a_name_in_use_is_refused(trainer: Trainer) -> None:
    second = Trainer(trainer.server, "run-1-1")

    assert_refused(second.order_join().result(), "Failed to initialize custom process group")
    second.close()


def test_a_group_that_does_not_come_together_ends_in_an_error_and_is_forgotten(server: Server) -> None:
    for _ in range(2):
        trainer = Trainer(server, "run-1-3")
        answer = trainer.order_join()
        with pytest.raises(TimeoutError):
            answer.result(timeout=0.5)
        trainer.close()

        assert_refused(answer.result(), "Failed to initialize custom process group")


def test_buckets_need_a_session_and_sessions_do_not_nest(trainer: Trainer) -> None:
    server = trainer.server
    bucket = trainer.order_bucket([TensorSpec(name="model.norm.weight", dtype="float32", shape=[64])])

    assert_refused(bucket.result(), "must run between begin_weight_update() and end_weight_update()")
    assert_refused(server.post("/end_weight_update"), "no weight-update session is open")
    assert_success(server.post("/begin_weight_update"))
    assert_refused(server.post("/begin_weight_update"), "a weight-update session is already open")
    assert_success(server.post("/end_weight_update"))


@pytest.mark.parametrize(
    ("spec", "fields"),
    [
        (TensorSpec(name="model.norm.weight", dtype="float32", shape=[64]), {"group_name": "another"}),
        (TensorSpec(name="model.norm.weight", dtype="float33", shape=[64]), {}),
        (TensorSpec(name="model.norm.weight", dtype="float32", shape=[-64]), {}),
    ],
)
def test_a_bucket_that_cannot_be_received_is_refused_at_once(
    trainer: Trainer, spec: TensorSpec, fields: dict[str, object]
) -> None:
    trainer.server.post("/begin_weight_update")

    assert_refused(trainer.order_bucket([spec], **fields).result(), "Failed to receive weights")


def test_a_tensor_of_another_shape_is_refused(trainer: Trainer) -> None:
    trainer.server.post("/begin_weight_update")
    answer = trainer.send_bucket({"model.norm.weight": torch.ones(32)}, weight_version="0-1")

    assert_refused(answer, "Failed to update parameter online")
    assert trainer.server.http.get("/model_info").json()["weight_version"] == "0-0"


def test_a_broadcast_that_breaks_off_is_an_error_and_a_load_from_disk_makes_up_for_it(
    trainer: Trainer, models: list[Path]
) -> None:
    server = trainer.server
    loaded = checksums(server)
    first, *rest = load_file(models[1] / "model.safetensors").items()
    with server.stream(prompt_of(10), max_new_tokens=LONG) as stream:
        stream.read(3)
        server.post("/pause_generation", mode="retract")
        server.post("/begin_weight_update")
        assert_success(trainer.send_bucket(dict([first]), flush_cache=False))
        assert checksums(server) != loaded
        answer = trainer.order_bucket([describe(name, tensor) for name, tensor in rest], weight_version="0-1")
        with pytest.raises(TimeoutError):
            answer.result(timeout=0.5)
        trainer.group.close()
        assert_refused(answer.result(), "Failed to receive weights")

        assert_success(server.post("/update_weights_from_disk", model_path=str(models[0]), weight_version="0-2"))
        assert_success(server.post("/end_weight_update"))
        server.post("/continue_generation")
        stream.read()

    assert [span["version"] for span in stream.meta["weight_versions"]] == ["0-0", "0-2"]
    assert checksums(server) == loaded
    assert_serves(server, models[0], "0-2")
