"""JSON in and out of the administrative routes."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from areal_async.inference.embedded.service import UpdateResult

T = TypeVar("T")


class JsonResponse(Response):
    """What msgspec can encode."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encode the body."""
        return msgspec.json.encode(content)


async def parse(request: Request, kind: type[T]) -> T:
    """Read a body; none at all is an empty object.

    Raises:
        msgspec.DecodeError: it is not JSON, or not of this kind.
    """
    return msgspec.json.decode(await request.body() or b"{}", type=kind)


def result_response(result: UpdateResult, **fields: Any) -> Response:
    """Answer an order about the weights as SGLang does: 400 with the same fields when it failed."""
    content = {"success": result.is_success, "message": result.message, **fields}
    return JsonResponse(content, status_code=200 if result.is_success else 400)
