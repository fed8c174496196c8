"""Which part of a model a parameter belongs to, for gradient norms part by part. Pure.

Every parameter is of one kind, and one of a decoder layer is of one third of the depth as well, so the squares of the
kinds' norms add up to that of the whole gradient. Told by names, as Hugging Face's decoders have them.
"""

import re
from collections.abc import Iterable

KINDS = ("embeddings", "attention", "mlp", "norms", "head", "other")
THIRDS = ("layers_first", "layers_middle", "layers_last")
"""Thirds of the decoder's layers; with fewer than three some have none."""
GROUPS = (*KINDS, *THIRDS)

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_MARKS = (
    # In this order: a norm inside the attention is a norm.
    ("norms", re.compile(r"norm|(?:^|\.)ln_")),
    ("attention", re.compile(r"attn|attention")),
    ("mlp", re.compile(r"mlp|expert|feed_forward|ffn")),
    ("embeddings", re.compile(r"embed|(?:^|\.)w[tp]e\.")),
    ("head", re.compile(r"lm_head|(?:^|\.)score\.")),
)


def num_layers(names: Iterable[str]) -> int:
    """Return the number of decoder layers, as far as these parameters tell."""
    found = [int(match.group(1)) for name in names if (match := _LAYER.search(name))]
    return max(found, default=-1) + 1


def groups_of(name: str, *, num_layers: int) -> tuple[str, ...]:
    """Return the kind of a parameter and, for one of a layer, its third.

    Args:
        name: in the model, with the layer's number there.
        num_layers: of the whole model.
    """
    kind = next((kind for kind, mark in _MARKS if mark.search(name)), "other")
    layer = _LAYER.search(name)
    return (kind, THIRDS[int(layer.group(1)) * 3 // num_layers]) if layer else (kind,)
