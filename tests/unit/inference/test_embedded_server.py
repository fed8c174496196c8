"""Where the embedded engine promises more than SGLang: what it cannot do it refuses, and whole weights or none."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.inference.embedded_engine import Server, prompt_of, reference_logprobs


@pytest.mark.parametrize(
    "fields",
    [
        {"input_ids": [10_000]},  # either of these ends SGLang on a CPU
        {"input_ids": [-1]},
        {"text": "a", "input_ids": [5]},
        {"input_ids": [5], "sampling_params": {"n": 2}},
        {"input_ids": [5], "sampling_params": {"regex": "a", "min_new_tokens": 1}},
        {"input_ids": [5], "logprob_start_len": 0},
        {"input_ids": [5], "sampling_params": {"logit_bias": {"5": 1e300}}},  # ends in NaN there
    ],
)
def test_a_request_that_would_be_misunderstood_answers_400(server: Server, fields: dict[str, object]) -> None:
    assert server.http.post("/generate", json=fields).status_code == 400


def test_a_seed_gives_the_same_answer_streamed_and_not(server: Server) -> None:
    """SGLang honours seeds only under deterministic inference, for which it has no attention backend on a CPU."""
    sampling = {"max_new_tokens": 40, "sampling_seed": 5}
    whole = server.generate(prompt_of(12), **sampling)
    with server.stream(prompt_of(12), **sampling) as stream:
        stream.read()
    other = server.generate(prompt_of(12), max_new_tokens=40, sampling_seed=6)

    assert stream.output_ids == whole["output_ids"] != other["output_ids"]


@pytest.mark.parametrize("damage", ["truncated", "missing tensor"])
def test_damaged_weights_are_refused_and_the_old_ones_served(
    server: Server, models: list[Path], tmp_path: Path, damage: str
) -> None:
    """SGLang ends at a torn file, and takes a checkpoint that lacks a tensor; hashes are checked before it is asked."""
    bad = shutil.copytree(models[1], tmp_path / "bad")
    weights = bad / "model.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-1000])
    else:
        tensors = load_file(weights)
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, weights)
    before = server.post("/weights_checker", action="checksum").json()
    server.post("/pause_generation", mode="retract")
    answer = server.post("/update_weights_from_disk", model_path=str(bad), weight_version="0-1")
    server.post("/continue_generation")

    assert answer.status_code == 400
    assert answer.json()["success"] is False
    assert server.post("/weights_checker", action="checksum").json() == before
    info = server.http.get("/model_info").json()
    assert (info["weight_version"], info["model_path"]) == ("0-0", str(models[0]))
    prompt = prompt_of(7)
    after = server.generate(prompt, max_new_tokens=5)
    logprobs = [entry[0] for entry in after["meta_info"]["output_token_logprobs"]]
    expected = reference_logprobs(models[0], prompt, after["output_ids"])
    torch.testing.assert_close(torch.tensor(logprobs), torch.tensor(expected), atol=1e-4, rtol=0.0)


def test_a_request_held_by_a_pause_can_be_aborted(server: Server) -> None:
    """SGLang does not hear of it before generation goes on."""
    server.post("/pause_generation")
    with (
        server.stream(prompt_of(5), rid="kept", max_new_tokens=10) as kept,
        server.stream(prompt_of(5), rid="dropped", max_new_tokens=10) as dropped,
    ):
        server.wait_for_load(num_waiting_reqs=2)
        server.post("/abort_request", abort_all=True)
        server.post("/abort_request", rid="dropped")
        dropped.read()
        server.post("/continue_generation")
        kept.read()

    assert dropped.meta["finish_reason"]["type"] == "abort"
    assert len(kept.output_ids) == 10


def test_an_abort_ends_the_named_request_and_none_whose_id_begins_alike(server: Server) -> None:
    """SGLang ends those too: ids that a client makes up must not begin with one another."""
    with (
        server.stream(prompt_of(5), rid="doomed", max_new_tokens=450) as doomed,
        server.stream(prompt_of(6), rid="doomed-not", max_new_tokens=60) as other,
    ):
        doomed.read(1)
        other.read(1)
        server.post("/abort_request", rid="doomed")
        doomed.read()
        other.read()

    assert doomed.meta["finish_reason"]["type"] == "abort"
    assert other.meta["finish_reason"]["type"] == "length"


def test_a_client_that_goes_away_frees_its_slot(server: Server) -> None:
    """SGLang waits for the pause to end first."""
    with server.stream(prompt_of(5), max_new_tokens=450) as stream:
        stream.read(1)
        # While paused in place nothing can finish: only the disconnect below can free the slot.
        server.post("/pause_generation", mode="in_place")
        server.wait_for_load(num_running_reqs=1)

    server.wait_for_load(num_running_reqs=0, num_waiting_reqs=0)
