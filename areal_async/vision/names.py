"""Names of the tensors of a model that sees: its checkpoints, transformers and SGLang do not agree on them."""

_PREFIXES = {"model.language_model.": "model.", "model.visual.": "visual."}
"""What some of them say, and what others do."""


def plain_name(name: str) -> str:
    """Return a name that all of them share: its shortest; that of a model that does not see is left as it is."""
    for long, short in _PREFIXES.items():
        if name.startswith(long):
            return short + name.removeprefix(long)
    return name
