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
_VISION = re.compile(r"(?:^|\.)visual\.")
_MARKS = (
    # Before all others: a tower has blocks, norms and attention of its own.
    ("other", _VISION),
    # In this order: a norm inside the attention is a norm.
    ("norms", re.compile(r"norm|(?:^|\.)ln_")),
    ("attention", re.compile(r"attn|attention")),
    ("mlp", re.compile(r"mlp|expert|feed_forward|ffn")),
    ("embeddings", re.compile(r"embed|(?:^|\.)w[tp]e\.")),
    ("head", re.compile(r"lm_head|(?:^|\.)score\.")),
)


def layer_of(name: str) -> int | None:
    """Return the number of the decoder layer that a parameter belongs to; None for one outside of layers."""
    found = _LAYER.search(name)
    return int(found[1]) if found and not is_of_vision(name) else None


def is_of_vision(name: str) -> bool:
    """Say whether a parameter is of the tower of a model that sees."""
    return _VISION.search(name) is not None


def num_layers(names: Iterable[str]) -> int:
    """Return the number of decoder layers, as far as these parameters tell."""
    return max((layer for name in names if (layer := layer_of(name)) is not None), default=-1) + 1


def groups_of(name: str, *, num_layers: int) -> tuple[str, ...]:
    """Return the kind of a parameter and, for one of a layer, its third.

    Args:
        name: in the model, with the layer's number there.
        num_layers: of the whole model.
    """
    kind = next((kind for kind, mark in _MARKS if mark.search(name)), "other")
    layer = layer_of(name)
    return (kind,) if layer is None else (kind, THIRDS[layer * 3 // num_layers])
