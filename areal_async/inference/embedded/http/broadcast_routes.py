"""SGLang's routes for weights that are broadcast. Field names, defaults, statuses and messages are SGLang's."""

from __future__ import annotations

from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from areal_async.inference.embedded.engine.broadcasts import Broadcasts
from areal_async.inference.embedded.engine.errors import RequestError, WeightsError
from areal_async.inference.embedded.engine.service import UpdateResult
from areal_async.inference.embedded.http.bodies import parse, result_response
from areal_async.protocol.types import TensorSpec

_DEFAULT_GROUP = "weight_update_group"
_Selector = Literal["target", "all"]
"""Which models are meant. SGLang also takes ``draft``; there is no draft model here."""


class _JoinBody(msgspec.Struct, kw_only=True):
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = _DEFAULT_GROUP
    backend: str = "nccl"


class _LeaveBody(msgspec.Struct):
    group_name: str = _DEFAULT_GROUP


class _SessionBody(msgspec.Struct):
    selector: _Selector = "all"


class _BroadcastUpdateBody(msgspec.Struct, kw_only=True):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = _DEFAULT_GROUP
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | None = None
    load_format: Literal["flattened_bucket"] | None = None
    selector: _Selector = "all"

    def specs(self) -> list[TensorSpec]:
        """Join what is listed apart.

        Raises:
            RequestError: the lists are not equally long.
        """
        counts = len(self.names), len(self.dtypes), len(self.shapes)
        if len(set(counts)) > 1:
            raise RequestError(f"names, dtypes, shapes: got {counts} of them, need as many of each")
        columns = zip(self.names, self.dtypes, self.shapes, strict=True)
        return [TensorSpec(name=name, dtype=dtype, shape=shape) for name, dtype, shape in columns]


class BroadcastRoutes:
    """What a trainer's broadcast needs of a server."""

    def __init__(self, broadcasts: Broadcasts) -> None:
        self._broadcasts = broadcasts

    async def join(self, request: Request) -> Response:
        body = await parse(request, _JoinBody)
        try:
            await self._broadcasts.join(
                body.group_name,
                address=body.master_address,
                port=body.master_port,
                rank=body.rank_offset,
                size=body.world_size,
                backend=body.backend,
            )
        except WeightsError as exc:
            return result_response(UpdateResult(False, f"Failed to initialize custom process group: {exc}."))
        return result_response(UpdateResult(True, "Succeeded to initialize custom process group."))

    async def leave(self, request: Request) -> Response:
        body = await parse(request, _LeaveBody)
        if not await self._broadcasts.leave(body.group_name):
            return result_response(UpdateResult(False, "The group to be destroyed does not exist."))
        return result_response(UpdateResult(True, "Succeeded to destroy custom process group."))

    async def begin(self, request: Request) -> Response:
        await parse(request, _SessionBody)
        if not await self._broadcasts.begin():
            message = "a weight-update session is already open; call end_weight_update() first"
            return result_response(UpdateResult(False, message))
        return result_response(UpdateResult(True, "Success"))

    async def update(self, request: Request) -> Response:
        body = await parse(request, _BroadcastUpdateBody)
        result = await self._broadcasts.update(
            body.group_name,
            body.specs(),
            is_flattened=body.load_format is not None,
            weight_version=body.weight_version,
            flush_cache=body.flush_cache,
            abort_all_requests=body.abort_all_requests,
        )
        return result_response(result)

    async def end(self, request: Request) -> Response:
        if not await self._broadcasts.end():
            message = "no weight-update session is open; call begin_weight_update() first"
            return result_response(UpdateResult(False, message))
        return result_response(UpdateResult(True, "Success"))
