"""The tiny models that see are what Qwen's are in everything but size: an image changes what they say."""

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoTokenizer

from areal_async.vision.pixels import patches
from areal_async.vision.rows import expand
from areal_async.vision.spec import FAMILIES, VisionSpec
from tools.make_tiny_vision import MARKED_IMAGE, write_folder

QUESTION = [{"role": "user", "content": [{"type": "text", "text": "How many in "}, {"type": "image"}]}]


def paint(width: int, height: int, seed: int) -> bytes:
    rng = np.random.default_rng(seed)
    buffer = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


@pytest.mark.parametrize("family", FAMILIES)
def test_answer_depends_on_the_image(family: str, tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model", family=family)
    spec = VisionSpec.read(folder)
    assert spec is not None
    assert spec.family == family
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    grid = spec.grid_of(3 * spec.factor, 2 * spec.factor)
    row = torch.tensor([expand(tokenizer(text)["input_ids"], [grid], spec)])
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()

    logits = []
    for seed in (1, 2):
        pixels = torch.from_numpy(patches(paint(3 * spec.factor, 2 * spec.factor, seed), spec))
        types = (row == spec.image_token_id).int()
        with torch.no_grad():
            answer = model(row, pixel_values=pixels, image_grid_thw=torch.tensor([grid]), mm_token_type_ids=types)
        logits.append(answer.logits[0, -1])

    assert (row == spec.image_token_id).sum() == 6
    assert torch.isfinite(logits[0]).all()
    assert (logits[0] - logits[1]).abs().max() > 1e-3
    assert sum(parameter.numel() for parameter in model.parameters()) < 300_000


def test_template_writes_calls_and_what_they_are_answered(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(write_folder(tmp_path / "model", family="qwen3_vl"))
    call = {"function": {"name": "look", "arguments": {"at": 1}}}
    messages = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": [{"type": "image"}]},
    ]

    assert tokenizer.apply_chat_template(messages, tokenize=False) == (
        '<|im_start|>assistant\n<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call><|im_end|>\n'
        f"<|im_start|>user\n<tool_response>{MARKED_IMAGE}</tool_response><|im_end|>\n"
    )


def test_template_writes_one_placeholder_between_marks_for_each_image(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(write_folder(tmp_path / "model", family="qwen3_vl"))
    parts = [{"type": "image_url", "image_url": {"url": ""}}, {"type": "text", "text": "?"}, {"type": "image"}]
    messages = [{"role": "system", "content": "Count."}, {"role": "user", "content": parts}]

    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)

    mark = MARKED_IMAGE
    assert text == (
        f"<|im_start|>system\nCount.<|im_end|>\n<|im_start|>user\n{mark}?{mark}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert len(tokenizer(mark)["input_ids"]) == 3


@pytest.mark.parametrize("family", FAMILIES)
def test_same_seed_writes_the_same_bytes(family: str, tmp_path: Path) -> None:
    folders = [write_folder(tmp_path / name, family=family, seed=seed) for name, seed in (("a", 1), ("b", 1), ("c", 2))]

    first, again, other = ({file.name: file.read_bytes() for file in folder.iterdir()} for folder in folders)

    assert first == again
    assert first["model.safetensors"] != other["model.safetensors"]
