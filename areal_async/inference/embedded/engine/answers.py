"""A request between its arrival and its last piece, and the JSON of what ``/generate`` says about its tokens."""

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from areal_async.inference.embedded.engine.sequence import Piece, RunningSequence
from areal_async.inference.embedded.engine.text import TextStream


@dataclass(eq=False, slots=True, kw_only=True)
class OpenRequest:
    """Takes the pieces of one request and makes response objects of them, each holding only what is new."""

    sequence: RunningSequence
    text: TextStream | None
    """None where the model has no tokenizer."""
    return_logprob: bool
    return_prompt_token_ids: bool
    is_submitted: bool = False
    """Whether the model thread has it; until then it waits at the door."""
    _pieces: list[Piece] = field(default_factory=list)
    _is_ready: asyncio.Event = field(default_factory=asyncio.Event)
    _created_at: float = field(default_factory=time.monotonic)

    def push(self, piece: Piece) -> None:
        """Take one piece from the model thread's delivery."""
        self._pieces.append(piece)
        self._is_ready.set()

    async def receive(self) -> list[Piece]:
        """Wait for pieces; return all that are ready."""
        await self._is_ready.wait()
        self._is_ready.clear()
        pieces, self._pieces = self._pieces, []
        return pieces

    def write(self, pieces: list[Piece]) -> dict[str, Any]:
        """Return one response object for pieces that became ready together."""
        last = pieces[-1]
        token_ids = last.token_ids if len(pieces) == 1 else [i for piece in pieces for i in piece.token_ids]
        meta: dict[str, Any] = {
            "id": self.sequence.rid,
            "finish_reason": last.finish_reason,
            "prompt_tokens": len(self.sequence.prompt_ids),
            "weight_version": last.weight_version,
            "num_retractions": last.num_retractions,
        }
        if self.return_logprob:
            logprobs = (logprob for piece in pieces for logprob in piece.logprobs)
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = [
                (logprob, token_id, None) for logprob, token_id in zip(logprobs, token_ids, strict=True)
            ]
            meta["output_token_logprobs_length"] = last.num_output_tokens
        if self.sequence.num_top_logprobs > 0:
            meta["input_top_logprobs"] = []
            meta["output_top_logprobs"] = [
                [(logprob, token_id, None) for logprob, token_id in at] for piece in pieces for at in piece.top_logprobs
            ]
        meta["reasoning_tokens"] = 0
        meta["completion_tokens"] = last.num_output_tokens
        meta["cached_tokens"] = last.cached_tokens
        if self.sequence.images is not None:
            meta["image_tokens"] = self.sequence.images.num_tokens
        if last.finish_reason is not None:
            meta["weight_versions"] = last.weight_versions
            meta["e2e_latency"] = time.monotonic() - self._created_at
        answer: dict[str, Any] = {"text": self._write_text(token_ids, last), "output_ids": token_ids, "meta_info": meta}
        if self.return_prompt_token_ids:
            answer["prompt_token_ids"] = self.sequence.prompt_ids
        return answer

    def _write_text(self, token_ids: list[int], last: Piece) -> str:
        if self.text is None:
            return ""
        if last.finish_reason is None:
            return self.text.push(token_ids)
        return self.text.finish(token_ids, last.finish_reason.get("matched"))
