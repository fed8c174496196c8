"""What both servers promise over HTTP: streams, pauses, swaps, aborts and errors, alike to the client."""

import shutil
from pathlib import Path

import pytest
import torch

from tests.unit.inference.embedded_engine import (
    EOS_ID,
    Server,
    body,
    prompt_of,
    reference_logprobs,
)

pytestmark = pytest.mark.timeout(900)  # of which the server's start takes most, once

TOLERANCE = 1e-4
LONG = 450
"""Tokens of an answer that is still running when a test has seen its first chunks."""


def assert_scored_by(
    model: Path, prompt: list[int], ids: list[int], logprobs: list[float], span: slice, temperature: float = 1.0
) -> None:
    expected = reference_logprobs(model, prompt, ids, temperature=temperature)
    torch.testing.assert_close(torch.tensor(logprobs[span]), torch.tensor(expected[span]), atol=TOLERANCE, rtol=0.0)


def swap(server: Server, model: Path, version: str, *, mode: str) -> None:
    assert server.post("/pause_generation", mode=mode).json()["status"] == "ok"
    flags = {"flush_cache": False} if mode == "in_place" else {}
    answer = server.post("/update_weights_from_disk", model_path=str(model), weight_version=version, **flags)
    assert answer.status_code == 200, answer.text
    assert server.post("/continue_generation").json()["status"] == "ok"


def test_streams_that_join_late_have_the_forward_pass_logprobs(server: Server, models: list[Path]) -> None:
    first, second = prompt_of(30, seed=1), prompt_of(8, seed=2)
    with server.stream(first, max_new_tokens=60) as early:
        early.read(3)
        with server.stream(second, max_new_tokens=40) as late:
            late.read()
        early.read()

    for prompt, stream in ((first, early), (second, late)):
        assert_scored_by(models[0], prompt, stream.output_ids, stream.logprobs, slice(None))


@pytest.mark.parametrize(
    ("sampling", "temperature"),
    [
        ({"temperature": 0.5}, 0.5),
        ({"temperature": 1.6}, 1.6),
        ({"temperature": 0.7, "top_p": 0.6, "top_k": 5}, 0.7),
        ({"temperature": 0.0}, 1.0),
        ({"temperature": 1e-7}, 1.0),
    ],
    ids=str,
)
def test_logprobs_are_those_of_all_words_at_the_temperature_asked_for_and_greedy_ones_of_one(
    server: Server, models: list[Path], sampling: dict[str, float], temperature: float
) -> None:
    """Whatever top_p and top_k cut away: so the trainer, which divides by the temperature alone, says the same."""
    prompt = prompt_of(20, seed=4)

    answer = server.generate(prompt, max_new_tokens=30, **sampling)

    logprobs = [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]
    assert_scored_by(models[0], prompt, answer["output_ids"], logprobs, slice(None), temperature)


def test_a_streamed_answer_equals_the_unstreamed_one(server: Server) -> None:
    prompt = prompt_of(12)
    whole = server.generate(prompt, max_new_tokens=40, temperature=0)
    with server.stream(prompt, max_new_tokens=40, temperature=0) as stream:
        stream.read()

    assert len(stream.events) > 1
    assert stream.output_ids == whole["output_ids"]
    assert stream.text == whole["text"]
    assert stream.logprobs == pytest.approx([entry[0] for entry in whole["meta_info"]["output_token_logprobs"]])
    assert stream.meta["finish_reason"] == whole["meta_info"]["finish_reason"] == {"type": "length", "length": 40}
    assert stream.meta["completion_tokens"] == whole["meta_info"]["completion_tokens"] == 40


def test_the_meta_info_has_sglangs_fields(server: Server) -> None:
    answer = server.generate([5, 6, 7], rid="mine", max_new_tokens=3)
    meta = answer["meta_info"]

    assert meta["id"] == "mine"
    assert meta["prompt_tokens"] == 3
    assert meta["cached_tokens"] == 0
    assert meta["weight_version"] == "0-0"
    assert meta["weight_versions"] == [{"version": "0-0", "start": 0, "end": 3}]
    assert [entry[1:] for entry in meta["output_token_logprobs"]] == [[token, None] for token in answer["output_ids"]]
    assert meta["output_token_logprobs_length"] == 3
    assert meta["e2e_latency"] > 0


def test_no_new_tokens_is_an_empty_answer(server: Server) -> None:
    answer = server.generate([5, 6, 7], max_new_tokens=0)

    assert answer["output_ids"] == []
    assert answer["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


def test_running_chunks_have_no_finish_reason_and_name_the_version(server: Server) -> None:
    with server.stream(prompt_of(5), max_new_tokens=20) as stream:
        stream.read()

    assert all(event["meta_info"]["finish_reason"] is None for event in stream.events[:-1])
    assert all(event["meta_info"]["weight_version"] == "0-0" for event in stream.events)
    assert "weight_versions" not in stream.events[0]["meta_info"]


def test_a_stop_token_ends_the_answer_and_stays_in_the_ids_only(server: Server) -> None:
    greedy = {"temperature": 0, "max_new_tokens": 30}
    free = server.generate(prompt_of(6), **greedy)["output_ids"]
    stop = free[10]
    answer = server.generate(prompt_of(6), ignore_eos=False, stop_token_ids=[stop], **greedy)

    end = free.index(stop) + 1
    assert answer["output_ids"] == free[:end]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}
    kept = server.generate(prompt_of(6), temperature=0, max_new_tokens=end - 1)
    assert answer["text"] == kept["text"]


def test_the_end_of_sequence_token_ends_the_answer_unless_ignored(server: Server) -> None:
    prompts = [prompt_of(4, seed=seed) for seed in range(8)]
    request = {"input_ids": prompts, "sampling_params": {"max_new_tokens": 400, "temperature": 1.0}}
    answers = server.http.post("/generate", json=request).json()
    request["sampling_params"] = {"max_new_tokens": 40, "temperature": 1.0, "ignore_eos": True}
    ignoring = server.http.post("/generate", json=request).json()

    ended = [answer for answer in answers if answer["meta_info"]["finish_reason"]["type"] == "stop"]
    assert ended
    for answer in ended:
        assert answer["meta_info"]["finish_reason"]["matched"] == EOS_ID
        assert answer["output_ids"].index(EOS_ID) == len(answer["output_ids"]) - 1
    assert [len(answer["output_ids"]) for answer in ignoring] == [40] * len(prompts)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_stop_string_ends_the_answer_and_is_cut_from_the_text(server: Server, *, is_streamed: bool) -> None:
    sampling = {"max_new_tokens": 80, "temperature": 0}
    free = server.generate(prompt_of(6), **sampling)["text"]
    stop = next(free[i : i + 2] for i in range(5, len(free)) if free[i : i + 2].isascii())
    if is_streamed:
        with server.stream(prompt_of(6), stop=["never in it, surely", stop], **sampling) as stream:
            stream.read()
        text, meta = stream.text, stream.meta
    else:
        answer = server.generate(prompt_of(6), stop=["never in it, surely", stop], **sampling)
        text, meta = answer["text"], answer["meta_info"]

    assert text == free[: free.index(stop)]
    assert meta["finish_reason"] == {"type": "stop", "matched": stop}


def test_a_prompt_over_the_context_is_refused(server: Server) -> None:
    answer = server.http.post("/generate", json=body(prompt_of(600), max_new_tokens=1))

    assert answer.status_code == 400
    assert "longer than the model's context length (512 tokens)" in answer.json()["error"]["message"]


def test_a_streamed_refusal_comes_as_an_event(server: Server) -> None:
    with server.stream(prompt_of(100), max_new_tokens=500) as stream:
        stream.read()

    assert stream.is_done
    assert stream.events[0]["error"]["code"] == 400
    assert "maximum context length of 512 tokens" in stream.events[0]["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"input_ids": []},
        {"input_ids": [5], "sampling_params": {"temperature": -1}},
        {"input_ids": [5], "sampling_params": {"top_p": 0}},
        {"input_ids": [5], "sampling_params": {"max_new_tokens": "many"}},
        {"input_ids": "abc"},
        {},
    ],
)
def test_a_request_that_cannot_be_served_answers_400(server: Server, fields: dict[str, object]) -> None:
    assert server.http.post("/generate", json=fields).status_code == 400


def test_text_in_gives_text_out(server: Server) -> None:
    answer = server.post("/generate", text="hello", sampling_params={"max_new_tokens": 4}).json()

    assert answer["meta_info"]["prompt_tokens"] == 5
    assert isinstance(answer["text"], str)
    assert "output_token_logprobs" not in answer["meta_info"]


def test_a_batch_of_prompts_answers_a_list(server: Server) -> None:
    request = {"input_ids": [[5, 6], [7, 8, 9]], "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    answers = server.http.post("/generate", json=request).json()

    assert [answer["meta_info"]["prompt_tokens"] for answer in answers] == [2, 3]


def test_after_a_retracting_swap_the_stream_goes_on_under_the_new_weights(server: Server, models: list[Path]) -> None:
    prompt = prompt_of(10)
    with server.stream(prompt, max_new_tokens=LONG) as stream:
        stream.read(3)
        swap(server, models[1], "0-1", mode="retract")
        stream.read()

    old, new = stream.meta["weight_versions"]
    assert (old["version"], new["version"]) == ("0-0", "0-1")
    assert (old["start"], new["start"], new["end"]) == (0, old["end"], LONG)
    assert 0 < old["end"] < LONG
    assert stream.meta["num_retractions"] == 1
    assert_scored_by(models[0], prompt, stream.output_ids, stream.logprobs, slice(0, old["end"]))
    assert_scored_by(models[1], prompt, stream.output_ids, stream.logprobs, slice(new["start"], LONG))


def test_an_in_place_swap_keeps_the_stream_running(server: Server, models: list[Path]) -> None:
    prompt = prompt_of(10)
    with server.stream(prompt, max_new_tokens=LONG) as stream:
        stream.read(3)
        swap(server, models[1], "0-1", mode="in_place")
        stream.read()

    old, new = stream.meta["weight_versions"]
    assert (old["version"], new["version"], new["end"]) == ("0-0", "0-1", LONG)
    assert stream.meta["num_retractions"] == 0
    assert_scored_by(models[0], prompt, stream.output_ids, stream.logprobs, slice(0, old["end"]))


def test_an_in_place_swap_that_asks_to_flush_says_it_could_not(server: Server, models: list[Path]) -> None:
    with server.stream(prompt_of(10), max_new_tokens=LONG) as stream:
        stream.read(1)
        server.post("/pause_generation", mode="in_place")
        answer = server.post("/update_weights_from_disk", model_path=str(models[1]), weight_version="0-1")
        server.post("/continue_generation")

    assert answer.status_code == 400
    assert "not flushed" in answer.json()["message"]


def test_an_aborting_pause_ends_streams_with_what_they_had(server: Server) -> None:
    with server.stream(prompt_of(10), max_new_tokens=LONG) as stream:
        stream.read(3)
        server.post("/pause_generation")
        stream.read()

    assert stream.meta["finish_reason"]["type"] == "abort"
    assert 3 <= len(stream.output_ids) < LONG
    assert stream.meta["completion_tokens"] == len(stream.output_ids)


def test_requests_that_arrive_during_a_pause_wait_and_run_under_the_new_weights(
    server: Server, models: list[Path]
) -> None:
    server.post("/pause_generation", mode="retract")
    with server.stream(prompt_of(5), max_new_tokens=10) as stream:
        server.post("/update_weights_from_disk", model_path=str(models[1]), weight_version="0-1")
        server.post("/continue_generation")
        stream.read()

    assert stream.meta["weight_versions"] == [{"version": "0-1", "start": 0, "end": 10}]


def test_requests_held_by_a_pause_survive_aborting_all(server: Server) -> None:
    server.post("/pause_generation")
    with server.stream(prompt_of(5), max_new_tokens=10) as kept:
        server.post("/abort_request", abort_all=True)
        server.post("/continue_generation")
        kept.read()

    assert len(kept.output_ids) == 10


def test_an_update_without_a_pause_lets_running_answers_finish_first(server: Server, models: list[Path]) -> None:
    # Not flushed: an answer may be finished and still be counted as running for a moment, which would refuse the flush.
    update = {"model_path": str(models[1]), "weight_version": "0-1", "flush_cache": False}
    with server.stream(prompt_of(5), max_new_tokens=100) as stream:
        stream.read(1)
        answer = server.post("/update_weights_from_disk", **update)
        stream.read()

    assert answer.json() == {
        "success": True,
        "message": "Succeeded to update model weights. Weight version updated to 0-1.",
        "num_paused_requests": 0,
    }
    assert stream.meta["weight_versions"] == [{"version": "0-0", "start": 0, "end": 100}]
    assert server.http.get("/model_info").json()["weight_version"] == "0-1"


def test_a_folder_without_weights_is_refused_and_the_old_ones_served(
    server: Server, models: list[Path], tmp_path: Path
) -> None:
    """More than this SGLang does not promise: a torn file ends it, and a missing tensor keeps its old values."""
    bad = shutil.copytree(models[1], tmp_path / "bad")
    (bad / "model.safetensors").unlink()
    before = server.post("/weights_checker", action="checksum").json()["ranks"]
    server.post("/pause_generation", mode="retract")
    answer = server.post("/update_weights_from_disk", model_path=str(bad), weight_version="0-1")
    server.post("/continue_generation")

    assert answer.status_code == 400
    assert answer.json()["success"] is False
    assert server.post("/weights_checker", action="checksum").json()["ranks"] == before
    assert server.http.get("/model_info").json()["weight_version"] == "0-0"


def test_the_weights_checksum_follows_the_weights(server: Server, models: list[Path]) -> None:
    first = server.post("/weights_checker", action="checksum").json()
    swap(server, models[1], "0-1", mode="retract")
    second = server.post("/weights_checker", action="checksum").json()
    swap(server, models[0], "0-2", mode="retract")
    third = server.post("/weights_checker", action="checksum").json()

    assert first["success"]
    assert first["ranks"] == third["ranks"] != second["ranks"]
    assert "model.embed_tokens.weight" in first["ranks"][0]["checksums"]


def test_an_abort_ends_the_named_request_only(server: Server) -> None:
    with (
        server.stream(prompt_of(5), rid="doomed", max_new_tokens=LONG) as doomed,
        server.stream(prompt_of(6), rid="other", max_new_tokens=60) as other,
    ):
        doomed.read(1)
        other.read(1)
        assert server.post("/abort_request", rid="doomed").status_code == 200
        doomed.read()
        other.read()

    assert doomed.meta["finish_reason"]["type"] == "abort"
    assert len(doomed.output_ids) < LONG
    assert other.meta["finish_reason"]["type"] == "length"


def test_a_request_id_in_use_is_refused(server: Server) -> None:
    with server.stream(prompt_of(5), rid="twice", max_new_tokens=LONG) as stream:
        stream.read(1)
        answer = server.http.post("/generate", json=body([5], rid="twice", max_new_tokens=1))

    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "Duplicate request ID detected: twice"


def test_the_cache_is_flushed_only_when_nobody_needs_it(server: Server) -> None:
    assert server.post("/flush_cache").status_code == 200
    with server.stream(prompt_of(5), max_new_tokens=LONG) as stream:
        stream.read(1)
        assert server.post("/flush_cache").status_code == 400


@pytest.mark.parametrize(
    "route", ["/health", "/health_generate", "/get_model_info", "/get_server_info", "/server_info"]
)
def test_information_routes_answer(server: Server, route: str) -> None:
    assert server.http.get(route).status_code == 200


def test_an_unknown_pause_mode_is_refused(server: Server) -> None:
    assert server.post("/pause_generation", mode="gently").status_code == 400
