"""The part of a GPU's memory that a server may take where it shares the GPU with the trainer.

The launcher reckons it from the size of both and hands it to its node by the environment; the node tells its servers.
"""

import os
from collections.abc import Mapping
from typing import Self

import msgspec

VARIABLE = "AREAL_CARD_SHARE"
CHUNK_TOKENS = 2048
"""Prompt tokens that SGLang computes at once beside a trainer: its activations are what it takes beyond its share."""
MARGIN = 0.9
"""Share of the memory that an estimate may fill before it is called tight."""
SPARE_BYTES = 5_000_000_000
"""What a server takes beyond its share: CUDA's context, graphs, activations.

Source: SGLang 0.5.23 sets aside 512 MB, 1.5 MB a token of ``CHUNK_TOKENS`` and about 1 GB for its graphs. An estimate:
not run on a GPU yet.
"""


class CardShare(msgspec.Struct, frozen=True):
    """The part of one server on each of its GPUs."""

    fraction: float
    """Of the whole memory, for weights and cache."""
    cache_tokens: int
    """Tokens whose keys and values fit into it beside the weights."""

    @property
    def environment(self) -> dict[str, str]:
        """Variable by which it is handed to a node."""
        return {VARIABLE: msgspec.json.encode(self).decode()}

    @classmethod
    def handed_over(cls, environment: Mapping[str, str] = os.environ) -> Self | None:
        """Return what this process was given; None where it shares no GPU."""
        told = environment.get(VARIABLE)
        return None if told is None else msgspec.json.decode(told, type=cls)

    def flags(self, *, is_sglang: bool) -> list[str]:
        """Return what a server is told of it.

        SGLang takes ``--mem-fraction-static`` of what is free as it starts, and of that again what a trainer takes
        while it loads: a fraction would mean less, or nothing, the sooner the trainer is there. So it gets nearly all
        of that, and is told how many tokens it may take.
        """
        tokens = ["--max-total-tokens", str(self.cache_tokens)]
        if is_sglang:
            return [*tokens, "--mem-fraction-static", f"{MARGIN:g}", "--chunked-prefill-size", str(CHUNK_TOKENS)]
        return tokens
