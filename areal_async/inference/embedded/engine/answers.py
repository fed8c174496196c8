"""The JSON of an answer: what ``/generate`` says about the tokens a sequence produced."""

from __future__ import annotations

import time
from typing import Any

from areal_async.inference.embedded.engine.protocol import SamplingParams
from areal_async.inference.embedded.engine.sequence import Piece
from areal_async.inference.embedded.engine.text import TextStream, Tokenizer


class AnswerWriter:
    """Turns the pieces of one request into response objects, each holding only what is new."""

    def __init__(
        self,
        *,
        rid: str,
        prompt_ids: tuple[int, ...],
        params: SamplingParams,
        return_logprob: bool,
        has_top_logprobs: bool,
        return_prompt_token_ids: bool,
        tokenizer: Tokenizer | None,
    ) -> None:
        self._rid = rid
        self._prompt_ids = prompt_ids
        self._return_logprob = return_logprob
        self._has_top_logprobs = has_top_logprobs
        self._return_prompt_token_ids = return_prompt_token_ids
        self._created_at = time.monotonic()
        self._text = None
        if tokenizer is not None:
            self._text = TextStream(
                tokenizer, skip_special_tokens=params.skip_special_tokens, no_stop_trim=params.no_stop_trim
            )

    def write(self, pieces: list[Piece]) -> dict[str, Any]:
        """Return one response object for pieces that became ready together."""
        last = pieces[-1]
        token_ids = last.token_ids if len(pieces) == 1 else [i for piece in pieces for i in piece.token_ids]
        meta: dict[str, Any] = {
            "id": self._rid,
            "finish_reason": last.finish_reason,
            "prompt_tokens": len(self._prompt_ids),
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
        if self._has_top_logprobs:
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
            answer["prompt_token_ids"] = self._prompt_ids
        return answer

    def _write_text(self, token_ids: list[int], last: Piece) -> str:
        if self._text is None:
            return ""
        if last.finish_reason is None:
            return self._text.push(token_ids)
        return self._text.finish(token_ids, last.finish_reason.get("matched"))
