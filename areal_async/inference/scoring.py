"""The client of servers that score: the number a reward model gives a prompt, whatever becomes of the servers.

A score that a server does not give is asked of the next one; none is ever made up. A prompt that no server could take
never leaves, as in ``client``.
"""

import math
from typing import Any, Self

import anyio
import msgspec
import structlog

from areal_async.config.settings import InferenceSettings
from areal_async.errors import GenerationError
from areal_async.inference.client import MAX_FRUITLESS_STREAMS, backoff_s, check_prompt
from areal_async.inference.faults import ServerFault
from areal_async.inference.http import JSON, TRANSPORT_ERRORS, make_client, refusal
from areal_async.inference.pool import ServerHandle, ServerPool
from areal_async.telemetry import wait_graph

log = structlog.get_logger()


class ScoringClient:
    """Scores prompts on the servers of a pool. An async context manager that owns the connections."""

    def __init__(self, pool: ServerPool, settings: InferenceSettings, *, max_requests: int, vocab_size: int) -> None:
        self.pool = pool
        self._settings = settings
        self._vocab_size = vocab_size
        self._http = make_client(max_connections=max_requests)

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        with anyio.CancelScope(shield=True):
            await self._http.aclose()

    async def score(self, prompt_ids: list[int]) -> float:
        """Return the model's score of the whole prompt: its head's output at the last token.

        Raises:
            GenerationError: no server may be sent this prompt, one refused it, none of them answered, the model has
                several labels, or ``inference.total_deadline_s`` is over.
        """
        check_prompt(prompt_ids, self._vocab_size)
        with anyio.move_on_after(self._settings.total_deadline_s):
            return await self._ask_until_answered(prompt_ids)
        raise GenerationError(f"score: got none within inference.total_deadline_s={self._settings.total_deadline_s:g}")

    async def _ask_until_answered(self, prompt_ids: list[int]) -> float:
        num_tries = 0
        while True:
            server = await self.pool.choose(cost_tokens=len(prompt_ids))
            try:
                return await self._ask(server, prompt_ids)
            except ServerFault as exc:
                cause = f"{type(exc.__cause__).__name__}: {exc}" if exc.__cause__ else str(exc)
                log.warning("score.broken", server_id=server.id, cause=cause)
                self.pool.cast_doubt(server, cause)
            finally:
                self.pool.release(server, cost_tokens=len(prompt_ids))
            num_tries += 1
            if num_tries == MAX_FRUITLESS_STREAMS:
                raise GenerationError(f"score: {num_tries} requests in a row were not answered, the last one: {cause}")
            await anyio.sleep(backoff_s(num_tries))

    async def _ask(self, server: ServerHandle, prompt_ids: list[int]) -> float:
        """Return the score, from one server.

        Raises:
            ServerFault: it gave none.
            GenerationError: the request or the model is at fault.
        """
        limit_s = self._settings.first_token_deadline_s
        body = msgspec.json.encode({"input_ids": prompt_ids})
        try:
            with wait_graph.on(wait_graph.server(server.id), "a score of"), anyio.fail_after(limit_s):
                response = await self._http.post(f"{server.url}/classify", content=body, headers=JSON)
        except TimeoutError as exc:
            raise ServerFault(f"no answer for {limit_s:g} s") from exc
        except TRANSPORT_ERRORS as exc:
            raise ServerFault(str(exc) or "connection lost") from exc
        if response.status_code != 200:
            raise refusal(response.status_code, response.content, what="score")
        score = _read_score(response.content)
        # As good as a token: a server that answers is not one that comes to nothing.
        server.num_generated_tokens += 1
        return score


class _Answer(msgspec.Struct):
    embedding: list[float]
    meta_info: dict[str, Any]


def _read_score(body: bytes) -> float:
    try:
        scores = msgspec.json.decode(body, type=_Answer).embedding
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise ServerFault(f"/classify: got {body[:200]!r}, need the embedding of one prompt") from exc
    if len(scores) != 1:
        raise GenerationError(
            f"score: got {len(scores)} numbers from the model, need one; serve a sequence classifier of one label"
        )
    if not math.isfinite(scores[0]):
        raise GenerationError(f"score: got {scores[0]}, need a finite number; the model's weights are broken")
    return scores[0]
