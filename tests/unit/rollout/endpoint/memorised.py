"""A model that knows one conversation with tools by heart: a real engine that serves it calls tools when asked."""

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from areal_async.config.settings import SamplingSettings
from areal_async.protocol.types import Sequence
from areal_async.rollout.policy.merge import merge_turns
from areal_async.rollout.policy.policy import RecordingPolicy
from tests.unit.rollout.byte_model import ScriptedModel
from tests.unit.rollout.chat_templates import codec_with, tokenizer_with
from tests.unit.rollout.endpoint.scripted_endpoint import CALL, END, PARAMETERS, QUESTION

TEXTS = (f"I add.\n{CALL}", CALL, "It is 5.")
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "add", "parameters": PARAMETERS}}]
MAX_STEPS = 400
ENOUGH = 0.02
"""Of a mean loss: every token is by far the likeliest."""


async def conversation() -> Sequence:
    """Return the conversation as a policy records it when no endpoint is in between."""
    hermes = codec_with("hermes")
    policy = RecordingPolicy(
        ScriptedModel(*([*hermes.encode(text), END] for text in TEXTS)), hermes, SamplingSettings(), name="uid"
    )
    messages: list[Any] = list(QUESTION)
    for _ in TEXTS:
        reply = await policy.chat(messages, tools=TOOLS)
        messages.append(reply.message)
        messages += [
            {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": "5"} for call in reply.tool_calls
        ]
    (row,) = merge_turns(policy.turns)
    return row


def memorise(row: Sequence, folder: Path) -> Path:
    """Train a model on one sequence until it says nothing else, and save it with the template. Takes some seconds."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        initializer_range=0.1,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=END,
        bos_token_id=None,
    )
    model: Any = Qwen3ForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ids = torch.from_numpy(row.token_ids).long()[None]
    labels = ids.masked_fill(~torch.from_numpy(row.loss_mask)[None], -100)
    for _ in range(MAX_STEPS):
        loss = model(ids, labels=labels).loss
        if loss.item() < ENOUGH:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    else:
        raise AssertionError(f"the conversation was not learnt: loss {loss.item():.3f}")
    model.save_pretrained(folder)
    tokenizer_with("hermes").save_pretrained(folder)
    return folder
