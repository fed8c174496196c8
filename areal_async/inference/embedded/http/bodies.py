"""JSON in and out of the administrative routes, and who may use them."""

import hmac
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, get_type_hints

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from areal_async.inference.embedded.engine.errors import SchemaError, WeightsError

T = TypeVar("T")
Endpoint = Callable[[Request], Awaitable[Response]]


class JsonResponse(Response):
    """What msgspec can encode."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encode the body."""
        return msgspec.json.encode(content)


def error_response(message: str, status: int, *, kind: str | None = None) -> Response:
    """Answer an error in SGLang's own shape (the other one it has nests, as OpenAI's does)."""
    error = {"object": "error", "message": message, "type": kind or str(status), "param": None, "code": status}
    return JsonResponse(error, status_code=status)


def admin_route(admin_key: str, path: str, endpoint: Endpoint, *others: str) -> Route:
    """Return a route, by POST and other methods, that answers only who sends the secret; everybody where there is none.

    As with SGLang's ``--admin-api-key``: ``Authorization: Bearer SECRET``, or 401 before the body is read.
    """
    expected = admin_key.encode()

    async def answer(request: Request) -> Response:
        scheme, _, sent = request.headers.get("authorization", "").partition(" ")
        is_allowed = scheme.lower() == "bearer" and hmac.compare_digest(sent.encode("latin-1"), expected)
        if admin_key and not is_allowed:
            return JsonResponse({"error": "Unauthorized"}, status_code=401)
        return await endpoint(request)

    return Route(path, answer, methods=["POST", *others])


async def parse(request: Request, kind: type[T]) -> T:
    """Read a body; none at all is an empty object.

    Raises:
        SchemaError: it is not JSON, or not of this kind.
    """
    try:
        return msgspec.json.decode(await request.body() or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise SchemaError(f"body of {request.url.path}: {exc}") from exc


def weights_order(carry_out: Callable[[Any], Awaitable[str]], **fields: Any) -> Endpoint:
    """Return a route that carries out an order about the weights and says how it went.

    As SGLang answers: 400 with the same fields when it failed.

    Args:
        carry_out: returns the message; raises WeightsError with it. Its one argument's type is the body's.
    """
    kind = get_type_hints(carry_out)["order"]

    async def answer(request: Request) -> Response:
        order = await parse(request, kind)
        try:
            content = {"success": True, "message": await carry_out(order), **fields}
        except WeightsError as exc:
            content = {"success": False, "message": str(exc), **fields}
        return JsonResponse(content, status_code=200 if content["success"] else 400)

    return answer
