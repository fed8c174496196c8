"""What the embedded engine makes of images: seen once, by the weights of the moment, where a prompt shows them."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from areal_async.inference.embedded.engine.errors import RequestError
from areal_async.inference.embedded.engine.images import ImageReader, PromptImages
from areal_async.inference.embedded.engine.protocol import parse_body
from areal_async.inference.embedded.engine.runner import ModelRunner
from areal_async.inference.embedded.engine.weights import stage_weights
from areal_async.inference.faults import ServerFault
from areal_async.inference.http import Checksums
from areal_async.inference.supervision.verify import compare
from areal_async.protocol.types import WeightsVersion
from tests.unit.inference.embedded_engine import Server, prompt_of
from tests.unit.inference.seeing_engine import (
    IMAGE_ID,
    SHOWN,
    ask,
    base64_of,
    build_seeing_model,
    png_of,
    reference_logprobs,
    refusal_of,
    shown_body,
)
from tests.unit.inference.test_embedded_scheduler import load, run, scheduler_of, sequence_of

PROMPT = [*prompt_of(6), *SHOWN, *prompt_of(4, seed=1)]
CAT, DOG = png_of(1), png_of(2)


@pytest.fixture(scope="module")
def seeing_models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [build_seeing_model(tmp_path_factory.mktemp(f"seeing{seed}"), seed=seed) for seed in range(2)]


@pytest.fixture
def runner(seeing_models: list[Path]) -> Iterator[ModelRunner]:
    with torch.inference_mode():
        yield load(seeing_models[0])


def place(reader: ImageReader, *pngs: bytes, before: int | None = None) -> tuple[list[int], PromptImages]:
    """Put images into the prompt, after one more token where one is given: then it is no sibling of others."""
    images = asyncio.run(reader.read([base64_of(png) for png in pngs]))
    prompt, placed = reader.place(PROMPT if before is None else [before, *PROMPT], images)
    assert placed is not None
    return prompt, placed


def count_passes(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the number of images in each pass of the tower."""
    passes: list[int] = []
    see = runner.model.get_image_features

    def counted(pixels: torch.Tensor, grids: torch.Tensor) -> Any:
        passes.append(len(grids))
        return see(pixels, grids)

    monkeypatch.setattr(runner.model, "get_image_features", counted)
    return passes


def test_an_image_is_seen_once_while_requests_have_it_and_again_by_new_weights(
    runner: ModelRunner, seeing_models: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes, reader, scheduler = count_passes(runner, monkeypatch), ImageReader(runner.vision), scheduler_of(runner)
    shown = [place(reader, CAT), place(reader, DOG), place(reader, CAT, before=5)]
    sequences = [sequence_of(prompt, 20, seed=seed, images=images) for seed, (prompt, images) in enumerate(shown)]
    for sequence in sequences:
        scheduler.submit(sequence)
        run(scheduler, 2)
    assert passes == [1, 1]

    scheduler.apply_weights(stage_weights(runner.model, str(seeing_models[1])), "0-1")
    late = sequence_of(shown[0][0], 5, seed=9, images=shown[0][1])
    scheduler.submit(late)
    run(scheduler)

    assert passes == [1, 1, 1]
    expected = reference_logprobs(seeing_models[1], PROMPT, [CAT], late.output_ids)
    torch.testing.assert_close(torch.tensor(late.logprobs), torch.tensor(expected), atol=1e-4, rtol=0)


def test_an_image_that_no_request_has_is_forgotten(runner: ModelRunner) -> None:
    reader = ImageReader(runner.vision)
    prompt, images = place(reader, CAT)
    runner.reserve(1, len(prompt))
    runner.prefill([prompt], [0], [images])
    assert runner.tower is not None
    assert len(runner.tower._seen) == len(reader._known) == 1

    del images

    assert len(runner.tower._seen) == len(reader._known) == 0


def test_a_placeholder_that_was_sampled_is_text_when_the_answer_is_computed_again(
    runner: ModelRunner, seeing_models: list[Path]
) -> None:
    prompt, images = place(ImageReader(runner.vision), CAT)
    output = [IMAGE_ID, 7, IMAGE_ID, IMAGE_ID]
    runner.reserve(1, len(prompt) + len(output))

    logits = runner.prefill([[*prompt, *output]], [0], [images])

    logprob = torch.log_softmax(logits[0], dim=-1)[9]
    expected = reference_logprobs(seeing_models[0], PROMPT, [CAT], [*output, 9])[-1]
    assert logprob.item() == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"input_ids": [5]}, [[]]),
        ({"input_ids": [5], "image_data": "a"}, [["a"]]),
        ({"input_ids": [5], "image_data": ["a", "b"]}, [["a", "b"]]),
        ({"input_ids": [[5], [6]], "image_data": "a"}, [["a"], ["a"]]),
        ({"input_ids": [[5], [6]], "image_data": ["a", "b"]}, [["a"], ["b"]]),
        ({"input_ids": [[5], [6]], "image_data": [["a", "b"], None]}, [["a", "b"], []]),
        ({"input_ids": [[5], [6]], "image_data": []}, [[], []]),
    ],
)
def test_image_data_is_read_as_sglang_reads_it(fields: dict[str, Any], expected: list[list[str]]) -> None:
    assert parse_body(msgspec.json.encode(fields)).images_of(len(expected)) == expected


@pytest.mark.parametrize("image_data", [["a"], ["a", "b", "c"]])
def test_a_batch_with_more_or_fewer_images_than_prompts_is_refused(image_data: list[str]) -> None:
    body = parse_body(msgspec.json.encode({"input_ids": [[5], [6]], "image_data": image_data}))
    with pytest.raises(RequestError, match="equal to the batch size"):
        body.images_of(2)


def test_a_model_that_does_not_see_refuses_images_and_serves_text_alone(server: Server) -> None:
    answer = server.http.post("/generate", json=shown_body([5], [CAT], max_new_tokens=1))

    assert refusal_of(answer) == "image_data: got 1 images, need none: this model does not see"
    assert server.http.get("/model_info").json()["has_image_understanding"] is False
    assert "image_tokens" not in ask(server, [5], [], max_new_tokens=1)["meta_info"]


@pytest.mark.parametrize("prefixes", [("model.", "visual."), ("model.language_model.", "model.visual.")])
@pytest.mark.parametrize("shown_prefixes", [("model.", "visual."), ("model.language_model.", "model.visual.")])
def test_tensors_of_a_seeing_model_are_verified_however_they_are_named(
    prefixes: tuple[str, str], shown_prefixes: tuple[str, str]
) -> None:
    """SGLang and checkpoints of Qwen2.5-VL have the short names, transformers and the others the long ones."""

    def tensors(names: tuple[str, str], merger: str, num: int) -> dict[str, str]:
        return {f"{names[0]}norm.weight": "ab" * num, f"{names[1]}merger.norm.weight": merger * num}

    target = WeightsVersion(version="0-1", path="", tensors_sha256=tensors(prefixes, "cd", 32))

    compare(Checksums(ranks=[tensors(shown_prefixes, "cd", 8)], whole=""), target)
    with pytest.raises(ServerFault, match="visual.merger.norm.weight"):
        compare(Checksums(ranks=[tensors(shown_prefixes, "ef", 8)], whole=""), target)
