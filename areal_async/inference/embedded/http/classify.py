"""The ``/classify`` route: the scores of whole prompts, as SGLang answers for a reward model."""

import math
import time
import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from areal_async.inference.embedded.engine.errors import RequestError
from areal_async.inference.embedded.engine.protocol import PromptBody
from areal_async.inference.embedded.engine.service import EngineService
from areal_async.inference.embedded.http.bodies import JsonResponse, error_response, parse

_NAN = "the model produced NaN; its weights are broken"


async def classify(service: EngineService, request: Request) -> Response:
    """Return ``{"embedding": [score], "meta_info": ...}``, or a list of them for a batch."""
    body = await parse(request, PromptBody)
    prompts = body.encode(service.tokenizer)
    rids = body.rid if isinstance(body.rid, list) else [None if body.is_batch else body.rid] * len(prompts)
    if len(rids) != len(prompts):
        raise RequestError(f"rid: got {len(rids)} values for {len(prompts)} prompts, need one each")
    started = time.monotonic()
    scores = await service.score(prompts)
    if not all(math.isfinite(number) for score in scores for number in score):
        return error_response(_NAN, 500)
    meta: dict[str, Any] = {
        "finish_reason": {"type": "length", "length": 0},
        "weight_version": service.weight_version,
        "num_retractions": 0,
        "e2e_latency": time.monotonic() - started,
    }
    answers = [
        {"embedding": score, "meta_info": meta | {"id": rid or uuid.uuid4().hex, "prompt_tokens": len(prompt)}}
        for prompt, rid, score in zip(prompts, rids, scores, strict=True)
    ]
    return JsonResponse(answers if body.is_batch else answers[0])
