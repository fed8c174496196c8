"""The ``/classify`` route: the scores of whole prompts, as SGLang answers for a reward model."""

from __future__ import annotations

import math
import time
import uuid
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from areal_async.inference.embedded.engine.errors import RequestError
from areal_async.inference.embedded.engine.protocol import is_batch, prompts_of
from areal_async.inference.embedded.engine.service import EngineService
from areal_async.inference.embedded.http.bodies import JsonResponse, error_response, parse

_NAN = "the model produced NaN; its weights are broken"


class _ClassifyBody(msgspec.Struct, kw_only=True):
    input_ids: list[int | list[int]] | None = None
    """One prompt, or a batch of them."""
    text: str | list[str] | None = None
    rid: str | list[str] | None = None


class ClassifyRoute:
    """What a server of scores is asked."""

    def __init__(self, service: EngineService) -> None:
        self._service = service

    async def answer(self, request: Request) -> Response:
        """Return ``{"embedding": [score], "meta_info": ...}``, or a list of them for a batch."""
        body = await parse(request, _ClassifyBody)
        prompts = prompts_of(body.input_ids, body.text, self._service.tokenizer)
        is_one = not is_batch(body.input_ids, body.text)
        rids = body.rid if isinstance(body.rid, list) else [body.rid if is_one else None] * len(prompts)
        if len(rids) != len(prompts):
            raise RequestError(f"rid: got {len(rids)} values for {len(prompts)} prompts, need one each")
        started = time.monotonic()
        scores = await self._service.score(prompts)
        if not all(math.isfinite(number) for score in scores for number in score):
            return error_response(_NAN, 500)
        answers = [
            {"embedding": score, "meta_info": self._meta(prompt, rid, time.monotonic() - started)}
            for prompt, rid, score in zip(prompts, rids, scores, strict=True)
        ]
        return JsonResponse(answers[0] if is_one else answers)

    def _meta(self, prompt_ids: list[int], rid: str | None, elapsed_s: float) -> dict[str, Any]:
        return {
            "id": rid or uuid.uuid4().hex,
            "finish_reason": {"type": "length", "length": 0},
            "prompt_tokens": len(prompt_ids),
            "weight_version": self._service.weight_version,
            "num_retractions": 0,
            "e2e_latency": elapsed_s,
        }
