"""httpx clients over aiohttp's transport, and the administrative routes of one server.

Generation and administration use separate clients: a weight update must not queue behind thousands of
streams. Proxies of the environment are never used; every server is one of ours.
"""

from collections.abc import Mapping
from typing import Any

import aiohttp
import httpx
import msgspec
from httpx_aiohttp import AiohttpTransport

from areal_async.inference.faults import ServerFault

CONNECT_S = 30.0
KEEP_ALIVE_S = 3.0
"""Below the five seconds after which the servers close an idle connection: reusing one at that moment fails."""
JSON = {"content-type": "application/json"}

TRANSPORT_ERRORS = (httpx.HTTPError, httpx.StreamError, aiohttp.ClientError, OSError)
"""What a broken connection raises; the transport translates most, not all, of aiohttp's errors."""


def make_client(*, max_connections: int) -> httpx.AsyncClient:
    """Return a client without deadlines of its own beyond the connection's: each call sets them."""
    limits = httpx.Limits(max_connections=max_connections, keepalive_expiry=KEEP_ALIVE_S)
    return httpx.AsyncClient(
        transport=AiohttpTransport(limits=limits, trust_env=False, verify=False),
        timeout=httpx.Timeout(connect=CONNECT_S, read=None, write=None, pool=None),
        trust_env=False,
    )


class ServerApi:
    """The administrative routes of the server at ``url``. Every call has a deadline; failures are ServerFault."""

    def __init__(self, http: httpx.AsyncClient, url: str) -> None:
        self._http = http
        self.url = url

    async def is_healthy(self, *, deadline_s: float) -> bool:
        """Ask ``/health``. A server that cannot be reached is not healthy."""
        try:
            return (await self._http.get(f"{self.url}/health", timeout=_timeout(deadline_s))).status_code == 200
        except TRANSPORT_ERRORS:
            return False

    async def weight_version(self, *, deadline_s: float) -> str:
        """Return the version that the server says it runs."""
        info = await self._call("GET", "/model_info", None, deadline_s)
        return str(info.get("weight_version", ""))

    async def pause(self, mode: str, *, deadline_s: float) -> None:
        """Stop generating; ``mode`` is SGLang's: ``retract``, ``in_place`` or ``abort``."""
        await self._call("POST", "/pause_generation", {"mode": mode}, deadline_s)

    async def resume(self, *, deadline_s: float) -> None:
        """Generate again."""
        await self._call("POST", "/continue_generation", {}, deadline_s)

    async def load_weights(self, *, path: str, version: str, flush_cache: bool, deadline_s: float) -> None:
        """Load a Hugging Face folder in place of the weights it runs."""
        body = {"model_path": path, "weight_version": version, "flush_cache": flush_cache}
        answer = await self._call("POST", "/update_weights_from_disk", body, deadline_s)
        if not answer.get("success", False):
            raise ServerFault(f"update to {version} refused: {answer.get('message', answer)}")

    async def abort(self, request_id: str, *, deadline_s: float) -> None:
        """End one request; it is no error when it is over already."""
        await self._call("POST", "/abort_request", {"rid": request_id}, deadline_s)

    async def _call(self, method: str, route: str, body: Mapping[str, Any] | None, deadline_s: float) -> dict[str, Any]:
        content = None if body is None else msgspec.json.encode(body)
        try:
            response = await self._http.request(
                method, f"{self.url}{route}", content=content, headers=JSON, timeout=_timeout(deadline_s)
            )
        except TRANSPORT_ERRORS as exc:
            raise ServerFault(f"{route}: {type(exc).__name__}: {exc}") from exc
        if response.status_code != 200:
            raise ServerFault(f"{route}: status {response.status_code}: {error_message(response.content)}")
        try:
            answer = msgspec.json.decode(response.content or b"{}")
        except msgspec.DecodeError:  # some routes answer in plain text
            return {}
        return answer if isinstance(answer, dict) else {}


def error_message(body: bytes) -> str:
    """Return the server's own words in an error's body: SGLang nests them, and so do the OpenAI routes."""
    try:
        answer = msgspec.json.decode(body)
    except msgspec.DecodeError:
        return body.decode(errors="replace").strip()[:500]
    for key in ("error", "detail", "message"):
        if isinstance(answer, dict) and key in answer:
            answer = answer[key]
    return answer if isinstance(answer, str) else str(answer)[:500]


def _timeout(deadline_s: float) -> httpx.Timeout:
    return httpx.Timeout(deadline_s, connect=min(deadline_s, CONNECT_S), pool=None)
