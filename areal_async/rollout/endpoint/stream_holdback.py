"""Which of a growing text may be told already: what could yet become a tool call or a stop string is held back. Pure.

A call is told when the reply is over, never while it is written: one that turns out to be no call stays in the text
as it was written, and so do those before it. Invariant: what was told is the beginning of the content, but for white
space at its edges.
"""

from collections.abc import Sequence

from areal_async.rollout.tools.parse import OPENINGS, THOUGHT_TAG, ToolFormat

_JSON_STARTS = ("{", "[", "```", "<|python_tag|>")


class StreamHoldback:
    """The text of one reply. ``push`` its pieces, then ask for the ``rest``."""

    def __init__(self, *, tool_format: ToolFormat | None, stop: Sequence[str], holds_all: bool = False) -> None:
        """Take ``tool_format`` where the model was given tools; ``holds_all`` tells nothing before the end."""
        tags = (THOUGHT_TAG,) if tool_format == "json" else OPENINGS.get(tool_format, ()) if tool_format else ()
        self._starts = (*stop, *tags)
        self._trims = tool_format is not None
        self._may_be_json = tool_format == "json"
        self._is_held = holds_all
        self._pending = ""
        self._told: list[str] = []

    def push(self, piece: str) -> str:
        """Add a piece; return what may be told now."""
        if self._is_held:
            return ""
        self._pending += piece
        end = self._end()
        told, self._pending = self._pending[:end], self._pending[end:]
        if told:
            self._told.append(told)
        return told

    def rest(self, content: str) -> str:
        """Return what is left to tell of the content, now that it is known."""
        told = "".join(self._told)
        for beginning in (told, told.lstrip()):
            if content.startswith(beginning):
                return content[len(beginning) :]
        return ""

    def _end(self) -> int:
        text = self._pending
        if self._may_be_json:
            body = text.lstrip()
            if any(body.startswith(start) for start in _JSON_STARTS):
                self._is_held = True
                return 0
            if any(start.startswith(body) for start in _JSON_STARTS):
                return 0
            self._may_be_json = False
        found = [at for start in self._starts if (at := text.find(start)) >= 0]
        if found:
            self._is_held = True
            end = min(found)
        else:
            end = len(text) - max((_overlap(text, start) for start in self._starts), default=0)
        return len(text[:end].rstrip()) if self._trims else end


def _overlap(text: str, start: str) -> int:
    """Return how many characters at the end of ``text`` may be the beginning of ``start``."""
    return next((n for n in range(min(len(text), len(start) - 1), 0, -1) if text.endswith(start[:n])), 0)
