"""``openenv:URL``: an environment behind a server of OpenEnv (0.10), by its protocol.

One WebSocket at ``URL/ws`` is one session: ``{"type": "reset", "data": {"seed": n}}`` and ``{"type": "step", "data":
ACTION}`` are each answered by ``{"type": "observation", "data": {"observation", "reward", "done"}}``, or by
``{"type": "error", "data": {"code", "message"}}``. What a server says is bounded and checked here. Of packages only
``websockets`` is needed; OpenEnv's own is the server's.
"""

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import msgspec
from pydantic import Field

from areal_async.api import Policy, Rewards
from areal_async.environments.environment import Environment
from areal_async.environments.names import EnvironmentName
from areal_async.environments.turns import SeededOptions, Step, play
from areal_async.errors import UserError, WorkflowError
from areal_async.protocol.types import Prompt

MAX_MESSAGE_BYTES = 8 << 20
"""Of one message of a server."""
MAX_REASON_CHARACTERS = 500
SCHEMES = {"http": "ws", "https": "wss", "ws": "ws", "wss": "wss"}


class OpenEnvOptions(SeededOptions):
    """Options of ``openenv:URL``."""

    observation_key: str = ""
    """Field of the observation that the model is told; empty for all of it, as JSON."""
    action_key: str = "message"
    """Field of the action that takes what the model says; empty where that is the action itself, a JSON object."""
    reset: dict[str, Any] = {}
    """What ``reset`` is given beside the seed."""
    max_sessions: int = Field(default=8, ge=1, le=4096)
    """Sessions that one node has open at once; a server serves no more than it is set to, by default one."""
    token_variable: str = ""
    """Environment variable with a token that the server asks for; empty for none."""


class _Data(msgspec.Struct):
    observation: dict[str, Any] = {}
    reward: float | None = None
    done: bool = False
    code: str = ""
    message: str = ""


class _Answer(msgspec.Struct):
    type: str
    data: _Data


class OpenEnvironment(Environment):
    """Each episode has a session of its own."""

    def __init__(self, url: str, options: OpenEnvOptions) -> None:
        """Take the server's address.

        Raises:
            UserError: it is none.
        """
        parts = urlsplit(url)
        if parts.scheme not in SCHEMES or not parts.hostname:
            raise UserError(f"openenv:{url}: got no address of a server, need one like openenv:http://localhost:8000")
        self._what = f"openenv:{url}"
        self._url = f"{SCHEMES[parts.scheme]}://{parts.netloc}{parts.path.rstrip('/')}/ws"
        self._name = EnvironmentName("openenv", url).token
        self._options = options
        self._sessions = asyncio.Semaphore(options.max_sessions)

    def rows(self) -> Iterator[Mapping[str, Any]]:
        """Yield a task for each seed."""
        yield from self._options.rows(self._name, {"server": self._name, "reset": self._options.reset})

    @asynccontextmanager
    async def on_node(self) -> AsyncIterator[None]:
        """Find out whether the server is there, before any episode fails for it."""
        async with self._session():
            pass
        yield

    async def episode(self, prompt: Prompt, policy: Policy) -> Rewards:
        """Play one session, reset with the seed of the row."""
        async with self._sessions, self._session() as session:
            begun = await self._asked(session, "reset", {**self._options.reset, "seed": int(prompt["seed"])})

            async def step(said: str) -> Step:
                answer = await self._asked(session, "step", self._action(said))
                return Step(self._text(answer), answer.reward or 0.0, answer.done)

            return await play(policy, self._text(begun), step, self._options, what=self._what)

    @asynccontextmanager
    async def _session(self) -> AsyncIterator[Any]:
        """Hold a connection.

        Raises:
            WorkflowError: the server is not there, or ends it.
        """
        from websockets.asyncio.client import connect
        from websockets.exceptions import WebSocketException

        token = os.environ.get(self._options.token_variable, "") if self._options.token_variable else ""
        headers = {"authorization": f"Bearer {token}"} if token else {}
        deadline_s = self._options.step_deadline_s
        try:
            async with connect(
                self._url, additional_headers=headers, max_size=MAX_MESSAGE_BYTES, open_timeout=deadline_s, proxy=None
            ) as connection:
                yield connection
        except (WebSocketException, OSError) as exc:
            raise WorkflowError(f"{self._what}: {exc or type(exc).__name__}"[:MAX_REASON_CHARACTERS]) from exc

    async def _asked(self, session: Any, kind: str, data: Mapping[str, Any]) -> _Data:
        """Return what the server answers.

        Raises:
            WorkflowError: it does not in time, or answers with an error or with what is no answer.
        """
        deadline_s = self._options.step_deadline_s
        try:
            async with asyncio.timeout(deadline_s):
                await session.send(json.dumps({"type": kind, "data": data}))
                answer = msgspec.json.decode(await session.recv(), type=_Answer)
        except TimeoutError:
            raise WorkflowError(
                f"{self._what}: {kind} took longer than env.step_deadline_s = {deadline_s:g} s"
            ) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise WorkflowError(f"{self._what}: {kind} was answered by what is no answer of OpenEnv: {exc}") from exc
        if answer.type != "observation":
            said = f"{answer.data.code} {answer.data.message}".strip()[:MAX_REASON_CHARACTERS]
            remedy = "; lower env.max_sessions, or have it serve more" if "CAPACITY" in answer.data.code else ""
            raise WorkflowError(f"{self._what}: {kind} was answered by {answer.type}: {said}{remedy}")
        return answer.data

    def _action(self, said: str) -> dict[str, Any]:
        if self._options.action_key:
            return {self._options.action_key: said}
        try:
            return msgspec.json.decode(said, type=dict[str, Any])
        except (msgspec.DecodeError, RecursionError):
            return {}  # which the server refuses, and says so

    def _text(self, data: _Data) -> str:
        key = self._options.observation_key
        if not key:
            return json.dumps(data.observation, ensure_ascii=False)
        text = data.observation.get(key)
        if not isinstance(text, str):
            names = ", ".join(data.observation) or "none"
            raise WorkflowError(f"{self._what}: the observation has no text {key!r}, its fields are {names}")
        return text


def environment(name: str, options: Mapping[str, Any]) -> Environment:
    """Return the environment of the server with this address."""
    return OpenEnvironment(name, OpenEnvOptions.read(options, what=f"openenv:{name}"))
