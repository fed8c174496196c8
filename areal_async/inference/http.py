"""httpx over aiohttp's transport: streams, and the administrative routes of one server.

Generation and administration have separate connections: a weight update must not queue behind thousands of
streams. Proxies of the environment are never used; every server is one of ours.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import lru_cache
from typing import Any, NamedTuple, Self

import aiohttp
import httpx
import msgspec
from httpx_aiohttp import AiohttpTransport

from areal_async.errors import GenerationError
from areal_async.inference.concurrency import Load
from areal_async.inference.faults import RefusalFault, ServerFault
from areal_async.process.plain_text import escaped
from areal_async.protocol.types import TensorSpec, UpdateGroup

CONNECT_S = 30.0
KEEP_ALIVE_S = 3.0
"""Below the five seconds after which the servers close an idle connection: reusing one at that moment fails."""
SGLANG_SPARE_TOKENS = 6
"""Tokens of SGLang's context beyond what it calls the longest prompt."""
MAX_CONTEXT_TOKENS = 1 << 40
"""No context is longer; a server that says so says nothing."""
JSON = {"content-type": "application/json"}
CACHE = {"tags": ["kv_cache"]}
"""The part of a server's memory that is given back: weights come back as they were only from a copy on the host."""

_HEADERS = httpx.Headers({**JSON, "accept-encoding": "identity"})
_EXTENSIONS = {"timeout": httpx.Timeout(None, connect=CONNECT_S).as_dict()}
_parsed = lru_cache(maxsize=1024)(httpx.URL)
_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

TRANSPORT_ERRORS = (httpx.HTTPError, httpx.StreamError, aiohttp.ClientError, OSError)
"""Exceptions of a broken connection; the transport translates most, not all, of aiohttp's errors."""


def make_client(*, max_connections: int) -> httpx.AsyncClient:
    """Return a client without deadlines of its own beyond the connection's: each call sets them."""
    limits = httpx.Limits(max_connections=max_connections, keepalive_expiry=KEEP_ALIVE_S)
    return httpx.AsyncClient(
        transport=AiohttpTransport(limits=limits, trust_env=False, verify=False),
        timeout=httpx.Timeout(connect=CONNECT_S, read=None, write=None, pool=None),
        trust_env=False,
    )


class StreamTransport(httpx.AsyncBaseTransport):
    """aiohttp's connections behind httpx's transport interface, with nothing between its reader and ours.

    httpx-aiohttp does the same for every request there can be, which costs twice as much for each event. Its errors
    are httpx's, here they are aiohttp's: both are TRANSPORT_ERRORS.
    """

    def __init__(self, *, max_connections: int) -> None:
        self._max_connections = max_connections
        self._session: aiohttp.ClientSession | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self._session is None:  # not earlier: it belongs to the running loop
            connector = aiohttp.TCPConnector(limit=self._max_connections, keepalive_timeout=KEEP_ALIVE_S, ssl=False)
            self._session = aiohttp.ClientSession(
                connector=connector,
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(sock_connect=CONNECT_S),
                auto_decompress=False,
            )
        response = await self._session.request(
            request.method, str(request.url), headers=request.headers, data=request.content, allow_redirects=False
        )
        return httpx.Response(response.status, headers=response.raw_headers, stream=_Body(response), request=request)

    async def aclose(self) -> None:
        if self._session is not None:
            await self._session.close()


class _Body(httpx.AsyncByteStream):
    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._response.content.iter_any()

    async def aclose(self) -> None:
        self._response.release()  # a connection with more to come is closed, not kept


class StreamClient:
    """Posts JSON that is answered by a stream. An async context manager that owns the connections.

    It drives the transport itself: what an ``httpx.AsyncClient`` does for each request (merging headers, cookies,
    authentication, redirects) is not needed here and costs more than all the rest of the request.
    """

    def __init__(self, transport: httpx.AsyncBaseTransport) -> None:
        self._transport = transport

    async def __aenter__(self) -> Self:
        await self._transport.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._transport.aclose()

    @asynccontextmanager
    async def post(self, url: str, content: bytes, *, headers: Mapping[str, str]) -> AsyncIterator[httpx.Response]:
        """Send ``content`` and enter with the response as soon as its headers are there.

        Args:
            headers: in addition to the usual ones.

        Raises:
            any of TRANSPORT_ERRORS: the connection broke, here or while the response is read.
        """
        stream = httpx.ByteStream(content)  # given as a stream, httpx leaves the usual headers to the transport
        merged = httpx.Headers({**_HEADERS, **headers}) if headers else _HEADERS
        request = httpx.Request("POST", _parsed(url), headers=merged, stream=stream, extensions=_EXTENSIONS)
        request.read()
        response = await self._transport.handle_async_request(request)
        try:
            yield response
        finally:
            await response.aclose()


class Checksums(NamedTuple):
    """What a server says of the weights it runs."""

    ranks: list[dict[str, str]]
    """Hash of each tensor's bytes by its name, for each rank."""
    whole: str
    """One over all tensors of all ranks."""


class ServerApi:
    """The administrative routes of the server at ``url``. Every call has a deadline; failures are ServerFault."""

    def __init__(self, http: httpx.AsyncClient, url: str, *, admin_key: str = "") -> None:
        """Take the secret that the server was started with; empty for one that needs none."""
        self._http = http
        self.url = url
        self.admin_key = admin_key

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

    async def served_name(self, *, deadline_s: float) -> str:
        """Return the name of the model that the server says it serves; an update from disk renames it."""
        info = await self._call("GET", "/model_info", None, deadline_s)
        return str(info.get("served_model_name", ""))

    async def context_tokens(self, *, deadline_s: float) -> int | None:
        """Return the longest prompt and answer together that the server takes; ``None`` where it does not say."""
        return context_tokens_of(await self._call("GET", "/server_info", None, deadline_s))

    async def pause(self, mode: str, *, deadline_s: float) -> None:
        """Stop generating; ``mode`` is SGLang's: ``retract``, ``in_place`` or ``abort``."""
        await self._call("POST", "/pause_generation", {"mode": mode}, deadline_s)

    async def resume(self, *, deadline_s: float) -> None:
        """Generate again."""
        await self._call("POST", "/continue_generation", {}, deadline_s)

    async def flush_cache(self, *, deadline_s: float) -> bool:
        """Forget what it has cached; False where a request needs its own, or waits for its grammar."""
        try:
            await self._call("GET", "/flush_cache", None, deadline_s)
        except RefusalFault:
            return False
        return True

    async def release_memory(self, *, deadline_s: float) -> None:
        """Give the memory of its cache to other processes. It must be paused, and run nothing: SGLang ends else."""
        await self._call("POST", "/release_memory_occupation", CACHE, deadline_s)

    async def resume_memory(self, *, deadline_s: float) -> None:
        """Take the memory back. It must have been released: SGLang ends else."""
        await self._call("POST", "/resume_memory_occupation", CACHE, deadline_s)

    async def load_weights(self, *, path: str, version: str, flush_cache: bool, deadline_s: float) -> None:
        """Load a Hugging Face folder in place of the weights it runs."""
        body = {"model_path": path, "weight_version": version, "flush_cache": flush_cache}
        await self._order("/update_weights_from_disk", body, deadline_s)

    async def join_group(self, group: UpdateGroup, *, rank: int, deadline_s: float) -> None:
        """Meet the other ranks of an update group. It generates nothing until all are there."""
        body = {
            "master_address": group.address,
            "master_port": group.port,
            "rank_offset": rank,
            "world_size": group.size,
            "group_name": group.name,
            "backend": group.backend,
        }
        await self._order("/init_weights_update_group", body, deadline_s)

    async def leave_group(self, name: str, *, deadline_s: float) -> None:
        """Leave an update group."""
        await self._order("/destroy_weights_update_group", {"group_name": name}, deadline_s)

    async def begin_update(self, *, deadline_s: float) -> None:
        """Open a session, within which buckets are received."""
        await self._order("/begin_weight_update", {}, deadline_s)

    async def end_update(self, *, deadline_s: float) -> None:
        """Close the session."""
        await self._order("/end_weight_update", {}, deadline_s)

    async def receive_bucket(
        self, bucket: Sequence[TensorSpec], *, group: str, version: str | None, flush_cache: bool, deadline_s: float
    ) -> None:
        """Receive one broadcast and load its tensors at once; ``version`` names the whole, with its last bucket."""
        body = {
            "names": [tensor.name for tensor in bucket],
            "dtypes": [tensor.dtype for tensor in bucket],
            "shapes": [tensor.shape for tensor in bucket],
            "group_name": group,
            "load_format": "flattened_bucket",
            "flush_cache": flush_cache,
            "weight_version": version,
        }
        await self._order("/update_weights_from_distributed", body, deadline_s)

    async def checksums(self, *, deadline_s: float) -> Checksums:
        """Return the checksums of the tensors that it runs."""
        answer = await self._order("/weights_checker", {"action": "checksum"}, deadline_s)
        try:
            return Checksums([rank["checksums"] for rank in answer["ranks"]], answer["per_engine_checksum"])
        except (KeyError, TypeError) as exc:
            raise ServerFault(f"/weights_checker: got {str(answer)[:200]}, need the checksums of each rank") from exc

    async def load(self, *, deadline_s: float) -> Load:
        """Return how busy it says it is."""
        return read_load(await self._call("GET", "/v1/loads", None, deadline_s))

    async def abort(self, request_id: str, *, deadline_s: float) -> None:
        """End one request; it is no error when it is over already."""
        await self._call("POST", "/abort_request", {"rid": request_id}, deadline_s)

    async def abort_all(self, *, deadline_s: float) -> None:
        """End every request that it has taken up; each answers what it had so far."""
        await self._call("POST", "/abort_request", {"abort_all": True}, deadline_s)

    async def parse_calls(
        self, text: str, tools: Sequence[Mapping[str, Any]], *, parser: str, deadline_s: float
    ) -> dict[str, Any]:
        """Have its own parser find the tool calls in what the model wrote."""
        body = {"text": text, "tools": tools, "tool_call_parser": parser}
        return await self._call("POST", "/parse_function_call", body, deadline_s)

    async def _order(self, route: str, body: Mapping[str, Any], deadline_s: float) -> dict[str, Any]:
        answer = await self._call("POST", route, body, deadline_s)
        if not answer.get("success", False):
            raise RefusalFault(f"{route}: {answer.get('message', answer)}")
        return answer

    async def _call(self, method: str, route: str, body: Mapping[str, Any] | None, deadline_s: float) -> dict[str, Any]:
        content = None if body is None else msgspec.json.encode(body)
        headers = {**JSON, "authorization": f"Bearer {self.admin_key}"} if self.admin_key else JSON
        try:
            response = await self._http.request(
                method, f"{self.url}{route}", content=content, headers=headers, timeout=_timeout(deadline_s)
            )
        except TRANSPORT_ERRORS as exc:
            raise ServerFault(f"{route}: {type(exc).__name__}: {exc}") from exc
        if response.status_code != 200:
            raise RefusalFault(f"{route}: status {response.status_code}: {error_message(response.content)}")
        return decode_answer(response.content)


def decode_answer(body: bytes) -> dict[str, Any]:
    """Return the JSON object in a body; an empty one for anything else, as some routes answer in plain text."""
    try:
        answer = msgspec.json.decode(body or b"{}")
    except _NOT_JSON:
        return {}
    return answer if isinstance(answer, dict) else {}


def context_tokens_of(info: Mapping[str, Any]) -> int | None:
    """Return what ``/server_info`` says of the longest prompt and answer together; ``None`` where it says nothing.

    SGLang names the longest prompt, which follows from the context and from the memory that it has for tokens; of the
    tokens that draft models write beside the answer it says how many there are.
    """

    def count(name: str) -> int:
        value = info.get(name)
        return value if isinstance(value, int) and 0 < value <= MAX_CONTEXT_TOKENS else 0

    longest_prompt = count("max_req_input_len")
    tokens = longest_prompt + SGLANG_SPARE_TOKENS if longest_prompt else count("context_length")
    drafted = max(
        count("speculative_eagle_topk") * count("speculative_num_steps"), count("speculative_num_draft_tokens")
    )
    return tokens - drafted if tokens > drafted else None


def read_load(answer: dict[str, Any]) -> Load:
    """Add up what ``/v1/loads`` says of each rank.

    Raises:
        ServerFault: it says something else.
    """
    try:
        ranks = msgspec.convert(answer, _Loads).loads
        return Load(
            num_running=sum(rank.num_running for rank in ranks),
            num_waiting=sum(rank.num_waiting for rank in ranks),
            token_usage=max(rank.token_usage for rank in ranks),
        )
    except ValueError as exc:  # of another shape, or no rank at all
        raise ServerFault(
            f"/v1/loads: got {str(answer)[:200]}, need running, waiting and token_usage of each rank"
        ) from exc


class _Loads(msgspec.Struct):
    loads: list[Load]


def error_message(body: bytes) -> str:
    """Return the server's own words in an error's body: SGLang nests them, and so do the OpenAI routes."""
    try:
        answer = msgspec.json.decode(body)
    except _NOT_JSON:
        return escaped(body.decode(errors="replace").strip()[:500])
    for key in ("error", "detail", "message"):
        if isinstance(answer, dict) and key in answer:
            answer = answer[key]
    return escaped(str(answer)[:500])


def refusal(status: int, body: bytes, *, what: str = "generation") -> Exception:
    """Return the error that a status other than 200 means: 4xx is the request's own fault."""
    message = error_message(body)
    if 400 <= status < 500 and status not in (408, 429):
        return GenerationError(f"{what}: refused with status {status}: {message}")
    return ServerFault(f"status {status}: {message}")


def _timeout(deadline_s: float) -> httpx.Timeout:
    return httpx.Timeout(deadline_s, connect=min(deadline_s, CONNECT_S), pool=None)
