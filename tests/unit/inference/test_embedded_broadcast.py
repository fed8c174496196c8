"""Where the embedded engine promises more than SGLang of a broadcast: waiting for one holds nothing else up."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from areal_async.inference.weight_group import describe
from areal_async.protocol.types import TensorSpec
from tests.unit.inference.broadcasting import Trainer, assert_success
from tests.unit.inference.embedded_engine import Server, prompt_of

EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture
def trainer(server: Server) -> Iterator[Trainer]:
    """A trainer whose group the shared server is in, with a session open."""
    trainer = Trainer(server, "run-1-1")
    trainer.join()
    server.post("/begin_weight_update")
    yield trainer
    trainer.close()


def checksums(server: Server) -> dict[str, str]:
    found: dict[str, str] = server.post("/weights_checker").json()["ranks"][0]["checksums"]
    return found


def test_answers_are_generated_while_a_broadcast_is_waited_for(trainer: Trainer, models: list[Path]) -> None:
    server, norm = trainer.server, load_file(models[1] / "model.safetensors")["model.norm.weight"]
    waiting = trainer.order_bucket([describe("model.norm.weight", norm)], weight_version="0-1")
    with server.stream(prompt_of(5), max_new_tokens=20) as stream:
        stream.read()
    with server.stream(prompt_of(5), max_new_tokens=20) as second:
        second.read(1)
        assert not waiting.done()
        trainer.group.broadcast(norm.view(torch.uint8))
        second.read()

    assert_success(waiting.result())
    assert len(stream.output_ids) == len(second.output_ids) == 20
    assert (
        stream.meta["weight_versions"] == second.meta["weight_versions"] == [{"version": "0-0", "start": 0, "end": 20}]
    )
    assert server.http.get("/model_info").json()["weight_version"] == "0-1"


def test_a_load_from_disk_comes_after_the_bucket_that_was_ordered_before_it(
    trainer: Trainer, models: list[Path]
) -> None:
    """Applied the other way round, the model would be of two versions."""
    server = trainer.server
    loaded = checksums(server)
    norm = torch.full((64,), 2.0)
    bucket = trainer.order_bucket([describe("model.norm.weight", norm)], weight_version="0-1")
    with pytest.raises(TimeoutError):
        bucket.result(timeout=0.5)
    load = trainer.post("/update_weights_from_disk", model_path=str(models[0]), weight_version="0-2")
    with pytest.raises(TimeoutError):
        load.result(timeout=0.5)
    trainer.group.broadcast(norm.view(torch.uint8))

    assert_success(bucket.result())
    assert_success(load.result())
    assert checksums(server) == loaded
    assert server.http.get("/model_info").json()["weight_version"] == "0-2"


def test_a_bucket_with_a_tensor_of_another_model_is_refused_whole(trainer: Trainer) -> None:
    before = checksums(trainer.server)
    bucket = {"model.norm.weight": torch.ones(64), "model.other.weight": torch.ones(64)}
    answer = trainer.send_bucket(bucket, weight_version="0-1")

    assert answer.status_code == 400
    assert answer.json()["success"] is False
    assert "got 1 unknown tensors (first: ['model.other.weight'])" in answer.json()["message"]
    assert checksums(trainer.server) == before
    assert trainer.server.http.get("/model_info").json()["weight_version"] == "0-0"


def test_a_tensor_of_another_type_becomes_the_models(trainer: Trainer) -> None:
    assert_success(trainer.send_bucket({"model.norm.weight": torch.full((64,), 1.5, dtype=torch.bfloat16)}))
    as_bfloat16 = checksums(trainer.server)
    assert_success(trainer.send_bucket({"model.norm.weight": torch.full((64,), 1.5)}))

    assert checksums(trainer.server) == as_bfloat16


def test_a_tied_head_may_be_sent_or_left_out(trainer: Trainer, models: list[Path]) -> None:
    embedding = load_file(models[1] / "model.safetensors")[EMBEDDING]
    assert_success(trainer.send_bucket({EMBEDDING: embedding}))
    without = checksums(trainer.server)
    assert_success(trainer.send_bucket({EMBEDDING: embedding, "lm_head.weight": embedding}))

    assert checksums(trainer.server) == without
    assert without[EMBEDDING] == without["lm_head.weight"]


def test_lists_that_do_not_match_are_refused(trainer: Trainer) -> None:
    spec = TensorSpec(name="model.norm.weight", dtype="float32", shape=[64])
    answer = trainer.order_bucket([spec], dtypes=[]).result()

    assert answer.status_code == 400
    assert "got (1, 0, 1) of them" in answer.text
