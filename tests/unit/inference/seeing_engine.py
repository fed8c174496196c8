"""Tiny models that see, images for them, and what transformers itself says of their answers."""

import base64
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from PIL import Image
from tokenizers import AddedToken
from transformers import (
    AutoModelForImageTextToText,
    AutoTokenizer,
    PretrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3VLConfig,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.unit.inference.embedded_engine import CONTEXT_LENGTH, EOS_ID, PAD_ID, VOCAB_SIZE, Server, body, build_model

IMAGE_ID, VIDEO_ID, START_ID, END_ID = range(VOCAB_SIZE, VOCAB_SIZE + 4)
SPECIAL_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
SHOWN = (START_ID, IMAGE_ID, END_ID)
"""An image in a prompt."""
PIXELS = {"shortest_edge": 56 * 56, "longest_edge": 512 * 512}
PATCH_SIZE = {"qwen3_vl": 16, "qwen2_5_vl": 14}
"""Their own: SGLang takes patches of Qwen2.5-VL of any other size for what its tower gives."""
SIDE = 224
"""Pixels: an image of this side, or a multiple, suits both."""
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% else %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
"""SGLang warms up with a chat about an image."""


def build_seeing_model(folder: Path, *, seed: int, family: str = "qwen3_vl") -> Path:
    """Save a random model (2 layers, 64 wide, and a tower of 2 blocks) with its tokenizer and processor."""
    build_model(folder, seed=seed)  # for its tokenizer
    (folder / "generation_config.json").unlink()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]}
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(seed)
    AutoModelForImageTextToText.from_config(_config(family)).save_pretrained(folder)
    sizes = {"patch_size": PATCH_SIZE[family], "merge_size": 2, "temporal_patch_size": 2, "size": PIXELS}
    normalization = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.6, 0.7]}
    processor, video = {
        "qwen3_vl": ("Qwen3VLProcessor", "Qwen3VLVideoProcessor"),
        "qwen2_5_vl": ("Qwen2_5_VLProcessor", "Qwen2VLVideoProcessor"),
    }[family]
    for name, kind in (
        ("preprocessor_config.json", {"image_processor_type": "Qwen2VLImageProcessorFast"}),
        ("video_preprocessor_config.json", {"video_processor_type": video}),
    ):
        (folder / name).write_text(json.dumps({"processor_class": processor, **kind, **sizes, **normalization}))
    return folder


def _config(family: str) -> PretrainedConfig:
    text: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE + len(SPECIAL_TOKENS),
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT_LENGTH,
        "initializer_range": 0.1,
        "pad_token_id": PAD_ID,
        "eos_token_id": EOS_ID,
        "bos_token_id": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]},
    }
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": PATCH_SIZE[family],
        "initializer_range": 0.1,
    }
    ids = {
        "image_token_id": IMAGE_ID,
        "video_token_id": VIDEO_ID,
        "vision_start_token_id": START_ID,
        "vision_end_token_id": END_ID,
        "tie_word_embeddings": True,
    }
    if family == "qwen3_vl":
        text |= {"head_dim": 16}
        text["rope_parameters"] |= {"mrope_interleaved": True}
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
        return Qwen3VLConfig(text_config=text, vision_config=vision, **ids)
    # One block looks at windows of 4 x 4 patches, the other at whole images.
    vision |= {"window_size": 4 * PATCH_SIZE[family], "fullatt_block_indexes": [1]}
    return Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids)


def png_of(seed: int, *, width: int = SIDE, height: int = SIDE) -> bytes:
    """Return a picture of noise."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG")
    return out.getvalue()


def base64_of(png: bytes) -> str:
    return base64.b64encode(png).decode()


def url_of(png: bytes) -> str:
    return f"data:image/png;base64,{base64_of(png)}"


def shown_body(prompt: Sequence[int], pngs: Sequence[bytes], **sampling: Any) -> dict[str, Any]:
    """Build a request about images."""
    return {**body(prompt, **sampling), "image_data": [url_of(png) for png in pngs]}


def ask(server: Server, prompt: Sequence[int], pngs: Sequence[bytes], **sampling: Any) -> dict[str, Any]:
    """Answer one prompt about images, unstreamed."""
    response = server.http.post("/generate", json=shown_body(prompt, pngs, **sampling))
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def refusal_of(response: httpx.Response) -> str:
    """Return the sentence of a refusal."""
    assert response.status_code == 400, response.text
    message: str = response.json()["error"]["message"]
    return message


def expanded(folder: Path, prompt: Sequence[int], pngs: Sequence[bytes]) -> list[int]:
    """Return the prompt with as many placeholders for each image as transformers' processor says."""
    counts = iter(_processed(folder, pngs)["image_grid_thw"].prod(-1) // 4) if pngs else iter(())
    return [token for given in prompt for token in [given] * (int(next(counts)) if given == IMAGE_ID else 1)]


def reference_logprobs(
    folder: Path, prompt: Sequence[int], pngs: Sequence[bytes], output: Sequence[int]
) -> list[float]:
    """Score ``output`` by transformers: the prompt in one pass, the output in the next, as it generates.

    So a placeholder that was sampled is what it is to the servers: a token as others.
    """
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([expanded(folder, prompt, pngs)])
    shown = {**_processed(folder, pngs), "mm_token_type_ids": (ids == IMAGE_ID).int()} if pngs else {}
    with torch.no_grad():
        start = model(ids, use_cache=True, **shown)
        rest = model(torch.tensor([output]), past_key_values=start.past_key_values)
    logits = torch.cat([start.logits[0, -1:], rest.logits[0, :-1]])
    scores: list[float] = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(output)[:, None])[:, 0].tolist()
    return scores


def _processed(folder: Path, pngs: Sequence[bytes]) -> dict[str, torch.Tensor]:
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    return dict(processor(images=[Image.open(io.BytesIO(png)) for png in pngs], return_tensors="pt"))
