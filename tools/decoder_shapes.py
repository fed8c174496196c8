"""Published decoders, as far as their sizes go: what is traced and what the table of memory is for."""

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from areal_async.doctor.preflight.memory import ModelSize


class DecoderShape(NamedTuple):
    """Sizes of a published decoder, as its ``config.json`` has them."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocab: int
    is_tied: bool

    @property
    def config(self) -> dict[str, Any]:
        """What ``config.json`` says."""
        return {
            "model_type": "qwen2", "num_hidden_layers": self.layers, "hidden_size": self.hidden,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.intermediate, "vocab_size": self.vocab, "tie_word_embeddings": self.is_tied,
            "max_position_embeddings": 32768, "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
        }  # fmt: skip

    @property
    def size(self) -> ModelSize:
        """The same as preflight reads it, its parameters counted: with biases of queries, keys and values."""
        kv_width = self.hidden // self.heads * self.kv_heads
        attention = 2 * self.hidden * (self.hidden + kv_width) + self.hidden + 2 * kv_width
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        words = self.vocab * self.hidden * (1 if self.is_tied else 2)
        return ModelSize(
            num_parameters=self.layers * layer + words + self.hidden,
            num_layers=self.layers,
            hidden=self.hidden,
            kv_width=kv_width,
            intermediate=self.intermediate,
            is_tied=self.is_tied,
            vocab=self.vocab,
            context=32768,
        )


QWEN2_5 = {
    "0.5B": DecoderShape(24, 896, 14, 2, 4864, 151_936, is_tied=True),
    "1.5B": DecoderShape(28, 1536, 12, 2, 8960, 151_936, is_tied=True),
    "7B": DecoderShape(28, 3584, 28, 4, 18_944, 152_064, is_tied=False),
    "14B": DecoderShape(48, 5120, 40, 8, 13_824, 152_064, is_tied=False),
    "32B": DecoderShape(64, 5120, 40, 8, 27_648, 152_064, is_tied=False),
    "72B": DecoderShape(80, 8192, 64, 8, 29_568, 152_064, is_tied=False),
}


def save_heads(shape: DecoderShape, directory: Path) -> Path:
    """Write a model's folder whose files of weights have a head, and nothing after it: a file for each parameter."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**shape.config)
    config.save_pretrained(directory)
    with torch.device("meta"):
        decoder = AutoModelForCausalLM.from_config(config)
    for name, parameter in decoder.named_parameters():
        num_bytes = 2 * math.prod(parameter.shape)
        entry = {"dtype": "BF16", "shape": list(parameter.shape), "data_offsets": [0, num_bytes]}
        head = json.dumps({name: entry}).encode()
        with (directory / f"{name}.safetensors").open("wb") as file:
            file.write(len(head).to_bytes(8, "little") + head)
            file.truncate(file.tell() + num_bytes)  # a hole, which takes no room on the disk
    (directory / "tokenizer.json").write_text("{}")
    return directory
