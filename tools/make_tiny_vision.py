"""Make a tiny untrained model that sees, Qwen3-VL or Qwen2.5-VL, whole enough for every engine and server.

    python -m tools.make_tiny_vision runs/tiny_vision
    python -m tools.make_tiny_vision runs/tiny_vision --family qwen2_5_vl

Patches are as large as the families' own, images far smaller: one of 64 x 64 pixels (56 x 56) has 4 tokens, the
largest has 64. The tokenizer has a token for each byte.

Invariant: the same seed writes the same bytes.
"""

import argparse
import json
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import AddedToken
from transformers import (
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from areal_async.vision.spec import FAMILIES
from tools.make_tiny_gsm8k import save_model, train_tokenizer

CONTEXT_TOKENS: Final = 2048
VISION_START: Final = "<|vision_start|>"
VISION_END: Final = "<|vision_end|>"
IMAGE_PAD: Final = "<|image_pad|>"
VIDEO_PAD: Final = "<|video_pad|>"
TAGS: Final = (VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD)

MARKED_IMAGE: Final = VISION_START + IMAGE_PAD + VISION_END

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{% set is_told = message['role'] == 'tool' %}"
    "<|im_start|>{{ 'user' if is_told else message['role'] }}\n{% if is_told %}<tool_response>{% endif %}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] or [] %}"
    "{% if part['type'] in ('image', 'image_url') %}"
    f"{MARKED_IMAGE}"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}"
    "{% if is_told %}</tool_response>{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Calls and what they are answered in Hermes' format, without the tools' schemas."""

TEXT: Final[dict[str, Any]] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT_TOKENS,
    "initializer_range": 0.1,
    "bos_token_id": None,
}
VISION: Final[dict[str, Any]] = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": TEXT["hidden_size"],
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "initializer_range": 0.1,
}
MROPE: Final = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2]}
PROCESSORS: Final[dict[str, dict[str, Any]]] = {
    "qwen3_vl": {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "size": {"shortest_edge": 64 * 64, "longest_edge": 256 * 256},
        "patch_size": 16,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    },
    "qwen2_5_vl": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2_5_VLProcessor",
        "min_pixels": 56 * 56,
        "max_pixels": 224 * 224,
        "patch_size": 14,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    },
}
VIDEO_PROCESSORS: Final = {"qwen3_vl": "Qwen3VLVideoProcessor", "qwen2_5_vl": "Qwen2VLVideoProcessor"}
"""Nobody shows a video; servers do not load a processor without one."""


def make_tokenizer() -> Any:
    """Return a tokenizer of bytes with the words of Qwen's chats, images' among them."""
    tags = [AddedToken(tag, special=True, normalized=False) for tag in TAGS]
    return train_tokenizer([], CHAT_TEMPLATE, tags=tags)


def make_model(family: str, tokenizer: Any, seed: int) -> Any:
    """Build an untrained model of about 200,000 parameters, whose two vision layers differ as the family's do.

    Qwen3-VL's first feeds a text layer too; Qwen2.5-VL's first looks no further than windows of 2 x 2 tokens.
    """
    ids = {
        "image_token_id": tokenizer.convert_tokens_to_ids(IMAGE_PAD),
        "video_token_id": tokenizer.convert_tokens_to_ids(VIDEO_PAD),
        "vision_start_token_id": tokenizer.convert_tokens_to_ids(VISION_START),
        "vision_end_token_id": tokenizer.convert_tokens_to_ids(VISION_END),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "tie_word_embeddings": True,
    }
    text = TEXT | {name: ids[name] for name in ("eos_token_id", "pad_token_id", "tie_word_embeddings")}
    text |= {"vocab_size": len(tokenizer), "rope_parameters": MROPE}
    vision = VISION | {"patch_size": PROCESSORS[family]["patch_size"]}
    torch.manual_seed(seed)
    if family == "qwen3_vl":
        text |= {"head_dim": 16, "rope_parameters": MROPE | {"mrope_interleaved": True}}
        vision |= {"num_position_embeddings": 16**2, "deepstack_visual_indexes": [0]}
        return Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **ids))
    vision |= {"window_size": 4 * vision["patch_size"], "fullatt_block_indexes": [1]}
    return Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=text, vision_config=vision, **ids))


def write_folder(folder: Path, *, family: str, seed: int = 1) -> Path:
    """Write an untrained model's folder, and return it."""
    tokenizer = make_tokenizer()
    return save(make_model(family, tokenizer, seed), tokenizer, folder, family=family)


def save(model: Any, tokenizer: Any, folder: Path, *, family: str) -> Path:
    """Write a model's folder with its tokenizer and what prepares its images, and return it."""
    save_model(model, tokenizer, folder)
    merging = {"temporal_patch_size": VISION["temporal_patch_size"], "merge_size": VISION["spatial_merge_size"]}
    images = PROCESSORS[family] | merging
    videos = {name: value for name, value in images.items() if name != "image_processor_type"}
    for name, content in (
        ("preprocessor_config.json", images),
        ("video_preprocessor_config.json", videos | {"video_processor_type": VIDEO_PROCESSORS[family]}),
    ):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return folder


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--family", choices=FAMILIES, default=FAMILIES[0])
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    write_folder(arguments.folder, family=arguments.family, seed=arguments.seed)


if __name__ == "__main__":
    main()
