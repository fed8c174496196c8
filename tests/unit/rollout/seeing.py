"""A model that sees, as far as a policy knows it: a tokenizer, a template that shows images, and sizes."""

from functools import lru_cache
from typing import Any

from PIL import Image

from areal_async.rollout.policy.text import TextCodec
from areal_async.vision.spec import VisionSpec
from tests.unit.rollout.chat_templates import HERMES, TINY
from tests.unit.vision.specs import shipped

PLACEHOLDER = "<|image_pad|>"
SEEING = HERMES.replace("+ message.content", "+ show(message.content)")
SEEING = f"""
{{%- macro show(content) %}}
    {{%- if content is string %}}{{{{- content }}}}{{%- else %}}
        {{%- for part in content %}}
            {{%- if part.type == 'image' or 'image' in part %}}{{{{- '<|vision_start|>{PLACEHOLDER}<|vision_end|>' }}}}
            {{%- else %}}{{{{- part.text }}}}{{%- endif %}}
        {{%- endfor %}}
    {{%- endif %}}
{{%- endmacro %}}{SEEING}"""
"""As Qwen's own: a part that has the key of an image is one."""


@lru_cache
def _tokenizer() -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|vision_start|>", PLACEHOLDER, "<|vision_end|>"]})
    tokenizer.chat_template = SEEING
    return tokenizer


def vision() -> VisionSpec:
    """A token for each 32 x 32 pixels; images of 4 to 64 tokens."""
    start, placeholder, end = _tokenizer().convert_tokens_to_ids(["<|vision_start|>", PLACEHOLDER, "<|vision_end|>"])
    return shipped(
        "qwen3_vl",
        image_token_id=placeholder,
        vision_start_token_id=start,
        vision_end_token_id=end,
        min_pixels=64 * 64,
        max_pixels=256 * 256,
    )


def seeing_codec(template: str = SEEING) -> TextCodec:
    tokenizer = _tokenizer()
    tokenizer.chat_template = template
    return TextCodec(tokenizer, stop_token_ids=[tokenizer.eos_token_id], vocab_size=len(tokenizer), vision=vision())


def picture(color: str, width: int = 64, height: int = 64) -> Image.Image:
    return Image.new("RGB", (width, height), color)


def shown(image: object, text: str = "What is it?") -> dict[str, Any]:
    """A user's message with an image and a question."""
    return {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": text}]}
