"""A model that ends whatever it says as soon as a grammar lets it, and says nothing where there is none.

Whatever it is asked, it likes the same tokens: an end of turn most, then what closes a text or an object in JSON. So
what it says is short, is JSON where a grammar sees to that, and has no other sense.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.unit.rollout.chat_templates import codec_with, tokenizer_with
from tests.unit.rollout.endpoint.scripted_endpoint import END

CONTEXT_LENGTH = 16384
"""Agents' own instructions are long."""
LIKED = '"}]:2f,'
"""Letters, the dearest first: a text is closed before it is begun, an object before it has another key."""


def build_terse(folder: Path, *, sharpness: float = 1.0) -> Path:
    """Save one of two layers, 64 wide, with a template; ``sharpness`` says how sure it is of what it likes."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT_LENGTH,
        initializer_range=0.02,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=END,
        bos_token_id=None,
    )
    model: Any = Qwen3ForCausalLM(config)
    liked = [END, *(token for letter in LIKED for token in codec_with("hermes").encode(letter))]
    with torch.no_grad():
        model.model.embed_tokens.weight[:, 0] = 1.0  # all tokens have this in common, and the head looks at it
        model.lm_head.weight[:, 0] = 0.0
        for rank, token in enumerate(liked):
            model.lm_head.weight[token, 0] = sharpness * (1.0 - 0.05 * rank)
    model.save_pretrained(folder)
    tokenizer_with("hermes").save_pretrained(folder)
    return folder
