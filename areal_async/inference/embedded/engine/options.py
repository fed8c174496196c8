"""The command line of the embedded engine. Nothing heavy is imported here: ``--help`` answers at once."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """What one engine process was told to do."""

    model_path: str
    host: str = "127.0.0.1"
    port: int = 30000
    weight_version: str = "default"
    """The label of the weights found at ``model_path``; updates bring their own."""
    dtype: str = "auto"
    device: str = "auto"
    num_threads: int | None = None
    """Intra-op threads of torch; None leaves torch's choice."""
    max_running_requests: int = 256
    context_length: int | None = None
    """Longest prompt plus answer, in tokens; None reads it from the model's configuration."""
    random_seed: int = 0
    stream_interval: int = 1
    """Tokens per streamed chunk; the first token is always sent at once."""
    max_total_tokens: int | None = None
    """Size of the key-value cache in tokens; None takes a share of the memory found."""
    max_prefill_tokens: int = 8192
    """Prompt tokens computed in one forward pass, so that a long queue does not starve running requests."""
    is_embedding: bool = False
    """Score prompts (``/classify``) with a sequence classifier instead of generating; SGLang's name for both."""


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {value}, need 1 or more")
    return value


def _optional_positive(text: str) -> int | None:
    return None if text.lower() == "none" else _positive(text)


def parse_options(argv: Sequence[str] | None = None) -> EngineOptions:
    """Read the command line; argparse ends the process with status 2 and a sentence when it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m areal_async.inference.embedded",
        description="Serve a Hugging Face causal language model, or a sequence classifier, with SGLang's routes.",
    )
    parser.add_argument("--model-path", required=True, help="folder with config.json and safetensors")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000, help="0 takes a free port and logs it")
    parser.add_argument("--weight-version", default="default", help="label of the weights at --model-path")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--num-threads", type=_optional_positive, default=None, help="torch threads")
    parser.add_argument("--max-running-requests", type=_positive, default=256)
    parser.add_argument("--context-length", type=_optional_positive, default=None, help="in tokens")
    parser.add_argument("--random-seed", type=int, default=0)
    parser.add_argument("--stream-interval", type=_positive, default=1, help="tokens per streamed chunk")
    parser.add_argument("--max-total-tokens", type=_optional_positive, default=None, help="cache size in tokens")
    parser.add_argument("--max-prefill-tokens", type=_positive, default=8192, help="prompt tokens per forward pass")
    parser.add_argument("--is-embedding", action="store_true", help="score prompts with a sequence classifier")
    return EngineOptions(**vars(parser.parse_args(argv)))
