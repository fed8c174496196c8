"""The command line of the embedded engine. Nothing heavy is imported here: ``--help`` answers at once."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {value}, need 1 or more")
    return value


def _optional_positive(text: str) -> int | None:
    return None if text.lower() == "none" else _positive(text)


def _option(default: Any, kind: Any = str, **others: Any) -> Any:
    """Return a field that the command line sets; ``others`` go to argparse."""
    return field(default=default, metadata={"type": kind, **others})


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """What one engine process was told to do: each field is an option, with dashes."""

    model_path: str = field(metadata={"required": True, "help": "folder with config.json and safetensors"})
    host: str = _option("127.0.0.1")
    port: int = _option(30000, int, help="0 takes a free port and logs it")
    weight_version: str = _option("default", help="label of the weights at --model-path")
    """The label of the weights found at ``model_path``; updates bring their own."""
    served_model_name: str | None = _option(None, help="what it says it serves; --model-path by default")
    dtype: str = _option("auto", choices=["auto", "float32", "bfloat16", "float16"])
    device: str = _option("auto", help="auto, cpu, cuda or cuda:N")
    num_threads: int | None = _option(None, _optional_positive, help="torch threads")
    """Intra-op threads of torch; None leaves torch's choice."""
    max_running_requests: int = _option(256, _positive)
    context_length: int | None = _option(None, _optional_positive, help="in tokens")
    """Longest prompt plus answer, in tokens; None reads it from the model's configuration."""
    random_seed: int = _option(0, int)
    stream_interval: int = _option(1, _positive, help="tokens per streamed chunk")
    """Tokens per streamed chunk; the first token is always sent at once."""
    max_total_tokens: int | None = _option(None, _optional_positive, help="cache size in tokens")
    """Size of the key-value cache in tokens; None takes a share of the memory found."""
    max_prefill_tokens: int = _option(8192, _positive, help="prompt tokens per forward pass")
    """Prompt tokens computed in one forward pass, so that a long queue does not starve running requests."""
    is_embedding: bool = field(
        default=False, metadata={"action": "store_true", "help": "score prompts with a sequence classifier"}
    )
    """Score prompts (``/classify``) with a sequence classifier instead of generating; SGLang's name for both."""


def parse_options(argv: Sequence[str] | None = None) -> EngineOptions:
    """Read the command line; argparse ends the process with status 2 and a sentence when it is wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m areal_async.inference.embedded",
        description="Serve a Hugging Face causal language model, or a sequence classifier, with SGLang's routes.",
    )
    for one in fields(EngineOptions):
        parser.add_argument(f"--{one.name.replace('_', '-')}", default=one.default, **one.metadata)
    return EngineOptions(**vars(parser.parse_args(argv)))
