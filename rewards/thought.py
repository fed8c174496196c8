"""What a model says once it has thought: the answer is looked for there, and thoughts are worth nothing.

Invariant: no text makes this raise; the time taken grows no faster than the text.
"""

from typing import Final

THINK_TAG: Final = "<think>"
THOUGHT_TAG: Final = "</think>"


def after_thought(text: str) -> str:
    """Return what stands behind the last thought; nothing behind one without an end, and all of a text without any.

    The tag that opens the thought may stand in the prompt, as many chat templates write it.
    """
    said = text.rpartition(THOUGHT_TAG)[2]
    return "" if said.lstrip().startswith(THINK_TAG) else said
