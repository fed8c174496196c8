"""A model's tokenizer and what its configuration says of tokens, read from its files as they are where these say all.

Whoever reads a configuration with transformers imports torch: 1.5 seconds of a processor and 130 MB, which a
node has no other use for; a server has, and is spared the library's list of all models. Its tokenizers do without.
"""

from pathlib import Path
from typing import Any, NamedTuple

import msgspec

_ANY_CLASS = ("TokenizersBackend", "PreTrainedTokenizerFast")
_CLASSES = {
    "llama": _ANY_CLASS,
    "qwen3": (*_ANY_CLASS, "Qwen2Tokenizer"),
    "qwen3_moe": (*_ANY_CLASS, "Qwen2Tokenizer"),
}
"""By type of model, the classes of tokenizers that transformers' ``AutoTokenizer`` takes where a tokenizer's files name
them; for other types or names it may take another."""


class ModelText(NamedTuple):
    """What is known of a model's text and tokens."""

    tokenizer: Any
    """Of transformers."""
    vocab_size: int
    end_ids: set[int]
    """Tokens that end a turn."""


class _Config(msgspec.Struct):
    model_type: str
    vocab_size: int
    auto_map: Any = None


class _TokenizerConfig(msgspec.Struct):
    tokenizer_class: str
    auto_map: Any = None


class _GenerationConfig(msgspec.Struct):
    eos_token_id: int | list[int] | None = None


def read_files(path: str) -> ModelText | None:
    """Return what the files of a model's folder say; None where a part is missing or for the library to interpret."""
    folder = Path(path)
    try:
        config = msgspec.json.decode((folder / "config.json").read_bytes(), type=_Config)
        named = msgspec.json.decode((folder / "tokenizer_config.json").read_bytes(), type=_TokenizerConfig)
        generation = folder / "generation_config.json"
        ends = _GenerationConfig()
        if generation.is_file():
            ends = msgspec.json.decode(generation.read_bytes(), type=_GenerationConfig)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError):
        return None
    is_plain = config.auto_map is None and named.auto_map is None and (folder / "tokenizer.json").is_file()
    if not is_plain or named.tokenizer_class not in _CLASSES.get(config.model_type, ()):
        return None
    import transformers  # here: it takes most of a second

    tokenizer = getattr(transformers, named.tokenizer_class).from_pretrained(path)
    eos = ends.eos_token_id
    end_ids = {tokenizer.eos_token_id, *(eos if isinstance(eos, list) else [eos])} - {None}
    return ModelText(tokenizer, config.vocab_size, end_ids)
