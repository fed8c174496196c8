"""Score how an answer is laid out: sections between tags, in their order, each once and with something in it.

    <think> ... </think> <answer> ... </answer>

Worth little by itself: a model learns the tags in a few steps. Give it a small weight beside a reward for being right.

Invariant: no text makes anything here raise; the time taken grows no faster than the text.
"""

from collections.abc import Sequence

TAGS = ("think", "answer")


def has_sections(text: str, tags: Sequence[str] = TAGS) -> float:
    """Return 1.0 when the text is these sections and nothing else but blanks, else 0.0."""
    return float(sections(text, tags) is not None)


def sections(text: str, tags: Sequence[str] = TAGS) -> dict[str, str] | None:
    """Return what each section holds; None when one is missing, repeated, empty, misplaced, or more is there."""
    if any(text.count(f"<{tag}>") != 1 or text.count(f"</{tag}>") != 1 for tag in tags):
        return None
    found, rest = {}, text
    for tag in tags:
        before, _, rest = rest.partition(f"<{tag}>")
        inside, is_closed, rest = rest.partition(f"</{tag}>")
        if before.strip() or not is_closed or not inside.strip():
            return None
        if any(f"<{other}>" in inside or f"</{other}>" in inside for other in tags):
            return None
        found[tag] = inside.strip()
    return None if rest.strip() else found
