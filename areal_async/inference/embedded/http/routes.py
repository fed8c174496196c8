"""SGLang's other routes: scores, health, information, pauses and weights. Field names and statuses are SGLang's."""

import hashlib
import math
import time
import uuid
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal

import anyio
import msgspec
import structlog
import torch
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from areal_async.inference.embedded.engine.broadcasts import Broadcasts
from areal_async.inference.embedded.engine.errors import RequestError, SchemaError
from areal_async.inference.embedded.engine.protocol import PromptBody, SamplingParams
from areal_async.inference.embedded.engine.scheduler import PauseMode
from areal_async.inference.embedded.engine.service import EngineService
from areal_async.inference.embedded.http.bodies import JsonResponse, admin_route, error_response, parse, weights_order
from areal_async.inference.embedded.http.generate import GenerateEndpoint

PROTOCOL_VERSION = "0.5.23"
"""The SGLang release whose protocol this is."""
_HEALTH_DEADLINE_S = 20.0
log = structlog.get_logger()

_NAN = "the model produced NaN; its weights are broken"


class _PauseBody(msgspec.Struct):
    mode: PauseMode = PauseMode.ABORT


class _AbortBody(msgspec.Struct):
    rid: str | None = None
    abort_all: bool = False


class _MemoryBody(msgspec.Struct):
    tags: list[Literal["kv_cache", "weights", "cuda_graph"]] | None = None
    """Parts of the memory; ``None``, like an empty list, for all of them."""

    def check(self) -> None:
        """Refuse to give back anything but the cache, which is all that is not needed again as it was.

        Raises:
            RequestError: the cache is not among the parts.
        """
        if self.tags and "kv_cache" not in self.tags:
            raise RequestError(f"tags: got {', '.join(self.tags)}, need kv_cache: the weights stay where they are")


class _CheckBody(msgspec.Struct):
    action: str = "checksum"


def build_app(service: EngineService, *, admin_key: str = "") -> Starlette:
    """Build the whole application around one service.

    Args:
        admin_key: the secret without which nobody administrates; empty for none.
    """
    routes = ServiceRoutes(service)
    broadcasts = Broadcasts(service)
    update_from_disk = weights_order(service.update_weights_from_disk, num_paused_requests=0)
    administration = partial(admin_route, admin_key)
    return Starlette(
        routes=[
            Route("/generate", GenerateEndpoint(service), methods=["POST", "PUT"]),
            Route("/classify", routes.classify, methods=["POST", "PUT"]),
            administration("/pause_generation", routes.pause),
            administration("/continue_generation", routes.resume),
            administration("/update_weights_from_disk", update_from_disk),
            administration("/init_weights_update_group", weights_order(broadcasts.join)),
            administration("/destroy_weights_update_group", weights_order(broadcasts.leave)),
            administration("/begin_weight_update", weights_order(broadcasts.begin)),
            administration("/update_weights_from_distributed", weights_order(broadcasts.update)),
            administration("/end_weight_update", weights_order(broadcasts.end)),
            administration("/abort_request", routes.abort),
            administration("/flush_cache", routes.flush_cache, "GET"),
            administration("/release_memory_occupation", routes.release_memory, "GET"),
            administration("/resume_memory_occupation", routes.resume_memory, "GET"),
            administration("/weights_checker", routes.check_weights, "GET"),
            Route("/health", routes.health),
            Route("/health_generate", routes.health_generate),
            Route("/model_info", routes.model_info),
            Route("/get_model_info", routes.model_info),
            Route("/server_info", routes.server_info),
            Route("/get_server_info", routes.server_info),
            Route("/v1/loads", routes.loads),
        ],
        exception_handlers={RequestError: _refuse},
    )


async def _refuse(request: Request, exc: Exception) -> Response:
    if isinstance(exc, SchemaError):
        return error_response(str(exc), 400, kind="Bad Request")
    return JsonResponse({"error": {"message": str(exc)}}, status_code=400)


class ServiceRoutes:
    """What a service does and says, by HTTP."""

    def __init__(self, service: EngineService) -> None:
        self._service = service

    # what changes it

    async def pause(self, request: Request) -> Response:
        body = await parse(request, _PauseBody)
        await self._service.pause(body.mode)
        return JsonResponse({"message": "Generation paused successfully.", "status": "ok"})

    async def resume(self, request: Request) -> Response:
        await self._service.resume()
        return JsonResponse({"message": "Generation continued successfully.", "status": "ok"})

    async def abort(self, request: Request) -> Response:
        body = await parse(request, _AbortBody)
        if body.abort_all:
            self._service.abort_all()
        elif body.rid:
            self._service.abort(body.rid)
        return Response(status_code=200)

    async def flush_cache(self, request: Request) -> Response:
        if await self._service.thread.call(lambda scheduler: scheduler.flush_cache()):
            return PlainTextResponse("Cache flushed.\n")
        return PlainTextResponse("Flush cache failed: requests are running or queued.\n", status_code=400)

    async def release_memory(self, request: Request) -> Response:
        """Answer ``null``, or 400 where requests run: the same order ends SGLang, which asserts that none does."""
        (await parse(request, _MemoryBody)).check()
        if await self._service.thread.call(lambda scheduler: scheduler.release_memory()):
            log.info("memory.released")
            return JsonResponse(None)
        return error_response("release_memory_occupation should be called only when server is idle.", 400)

    async def resume_memory(self, request: Request) -> Response:
        """Answer ``null``, or 400 where nothing was released, which ends SGLang too."""
        (await parse(request, _MemoryBody)).check()
        if await self._service.thread.call(lambda scheduler: scheduler.resume_memory()):
            log.info("memory.resumed")
            return JsonResponse(None)
        return error_response("resume_memory_occupation: nothing was released", 400)

    async def check_weights(self, request: Request) -> Response:
        body = await parse(request, _CheckBody)
        if body.action != "checksum":
            message = f"action: got {body.action!r}, need 'checksum'"
            return JsonResponse({"success": False, "message": message}, status_code=400)
        checksums = await self._service.checksum_weights()
        whole = hashlib.sha256()
        for name in sorted(checksums):
            whole.update(name.encode() + checksums[name].encode())
        place = {"role": "target", "tp_rank": 0, "tp_size": 1, "dp_rank": 0, "dp_size": 1, "pp_rank": 0, "pp_size": 1}
        rank = {
            "checksums": checksums,
            "per_gpu_checksum": whole.hexdigest(),
            "parallelism_info": [{**place, "rank": 0, "size": 1}],
        }
        content = {
            "success": True,
            "message": "Success.",
            "ranks": [rank],
            "per_engine_checksum": hashlib.sha256(whole.hexdigest().encode()).hexdigest(),
        }
        return JsonResponse(content)

    # what leaves it as it is

    async def health(self, request: Request) -> Response:
        """Answer 200 when the model thread answers between two steps."""
        with anyio.move_on_after(_HEALTH_DEADLINE_S):
            if self._service.thread.is_alive:
                await self._service.thread.call(lambda scheduler: None)
                return Response(status_code=200)
        return Response(status_code=503)

    async def health_generate(self, request: Request) -> Response:
        """Generate one token; while others are generated or generation is paused, the thread's answer is enough."""
        if not self._service.is_generation:
            return await self.health(request)
        if self._service.is_paused or await self._service.thread.call(
            lambda scheduler: scheduler.has_work or scheduler.is_released
        ):
            return await self.health(request)
        probe = self._service.open([0], SamplingParams(max_new_tokens=1, temperature=0.0))
        try:
            with anyio.move_on_after(_HEALTH_DEADLINE_S):
                self._service.enter(probe)
                pieces = await probe.receive()
                is_healthy = (pieces[-1].finish_reason or {}).get("type") != "abort"
                return Response(status_code=200 if is_healthy else 503)
            return Response(status_code=503)
        finally:
            self._service.close(probe)

    async def classify(self, request: Request) -> Response:
        """Return ``{"embedding": [score], "meta_info": ...}``, or a list of them for a batch."""
        body = await parse(request, PromptBody)
        prompts = body.encode(self._service.tokenizer)
        rids = body.rid if isinstance(body.rid, list) else [None if body.is_batch else body.rid] * len(prompts)
        if len(rids) != len(prompts):
            raise RequestError(f"rid: got {len(rids)} values for {len(prompts)} prompts, need one each")
        started = time.monotonic()
        scores = await self._service.score(prompts)
        if not all(math.isfinite(number) for score in scores for number in score):
            return error_response(_NAN, 500)
        meta: dict[str, Any] = {
            "finish_reason": {"type": "length", "length": 0},
            "weight_version": self._service.weight_version,
            "num_retractions": 0,
            "e2e_latency": time.monotonic() - started,
        }
        answers = [
            {"embedding": score, "meta_info": meta | {"id": rid or uuid.uuid4().hex, "prompt_tokens": len(prompt)}}
            for prompt, rid, score in zip(prompts, rids, scores, strict=True)
        ]
        return JsonResponse(answers if body.is_batch else answers[0])

    async def model_info(self, request: Request) -> Response:
        service = self._service
        config = service.runner.model.config
        return JsonResponse(
            {
                "model_path": service.model_path,
                "served_model_name": service.served_model_name,
                "tokenizer_path": service.options.model_path,
                "is_generation": service.is_generation,
                "preferred_sampling_params": None,
                "weight_version": service.weight_version,
                "load_format": "auto",
                "reasoning_parser": None,
                "tool_call_parser": None,
                "disaggregation_mode": "null",
                "has_image_understanding": service.runner.vision is not None,
                "has_audio_understanding": False,
                "model_type": config.model_type,
                "architectures": config.architectures,
            }
        )

    async def server_info(self, request: Request) -> Response:
        service = self._service
        load = await self._load()
        state = {
            "weight_version": service.weight_version,
            "last_gen_throughput": load["gen_throughput"],
            "max_total_num_tokens": load["max_total_num_tokens"],
        }
        return JsonResponse(
            {
                **asdict(service.options),
                "device": str(service.runner.device),
                "context_length": service.context_length,
                "max_total_num_tokens": load["max_total_num_tokens"],
                "incremental_streaming_output": True,
                "internal_states": [state],
                "engine": "embedded",
                "version": PROTOCOL_VERSION,
                "frontend": "python",
            }
        )

    async def loads(self, request: Request) -> Response:
        device = self._service.runner.device
        return JsonResponse(
            {
                "timestamp": datetime.now(UTC).isoformat(),
                "version": PROTOCOL_VERSION,
                "accelerator": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
                "num_accelerators": 1,
                "loads": [await self._load()],
            }
        )

    async def _load(self) -> dict[str, Any]:
        service = self._service
        num_running, num_waiting, num_used = await service.thread.call(
            lambda scheduler: (scheduler.num_running, scheduler.num_waiting, scheduler.num_used_tokens)
        )
        total = service.runner.max_total_tokens
        return {
            "timestamp": datetime.now(UTC).timestamp(),
            "dp_rank": 0,
            "num_running_reqs": num_running,
            "num_waiting_reqs": num_waiting + len(service.at_door),
            "num_used_tokens": num_used,
            "num_total_tokens": num_used,
            "max_total_num_tokens": total,
            "max_running_requests": service.options.max_running_requests,
            "token_usage": num_used / total,
            "gen_throughput": service.thread.throughput,
            "cache_hit_rate": 0.0,
            "utilization": num_running / service.options.max_running_requests,
        }
