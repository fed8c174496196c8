"""A request between its arrival and its last piece, and the JSON of what ``/generate`` says about its tokens."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from areal_async.inference.embedded.engine.sequence import Piece, RunningSequence
from areal_async.inference.embedded.engine.text import TextStream, Tokenizer


class OpenRequest:
    """Takes the pieces of one request and makes response objects of them, each holding only what is new."""

    def __init__(
        self,
        sequence: RunningSequence,
        tokenizer: Tokenizer | None,
        *,
        return_logprob: bool,
        return_prompt_token_ids: bool,
    ) -> None:
        self.sequence = sequence
        self.is_submitted = False
        """Whether the model thread has it; until then it waits at the door."""
        self._pieces: list[Piece] = []
        self._is_ready = asyncio.Event()
        self._return_logprob = return_logprob
        self._return_prompt_token_ids = return_prompt_token_ids
        self._created_at = time.monotonic()
        params = sequence.params
        self._text = None
        if tokenizer is not None:
            self._text = TextStream(
                tokenizer, skip_special_tokens=params.skip_special_tokens, no_stop_trim=params.no_stop_trim
            )

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
        if self._return_logprob:
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
        if last.finish_reason is not None:
            meta["weight_versions"] = last.weight_versions
            meta["e2e_latency"] = time.monotonic() - self._created_at
        answer: dict[str, Any] = {"text": self._write_text(token_ids, last), "output_ids": token_ids, "meta_info": meta}
        if self._return_prompt_token_ids:
            answer["prompt_token_ids"] = self.sequence.prompt_ids
        return answer

    def _write_text(self, token_ids: list[int], last: Piece) -> str:
        if self._text is None:
            return ""
        if last.finish_reason is None:
            return self._text.push(token_ids)
        return self._text.finish(token_ids, last.finish_reason.get("matched"))
