"""A taskset of verifiers with a harness of its own: one move of Nim, told as the tiny model has learned to read it.

The harness talks from within the node's process: it starts no program, so hundreds of episodes take seconds.
"""

import functools
import json
from collections.abc import Iterator
from typing import Any, ClassVar

import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult

MOST = 3


class MoveData(vf.TaskData):
    stones: int = 0


class MoveTask(vf.Task[MoveData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def is_legal(self, trace: vf.Trace) -> float:
        """Say whether the rules allow the move."""
        digits = [int(one) for one in trace.last_reply if one in "0123456789"]
        return float(bool(digits) and 1 <= digits[-1] <= min(MOST, self.data.stones))

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        """Return how long the answer is."""
        return float(len(trace.last_reply))


class MovesConfig(vf.TasksetConfig):
    most_stones: int = 9


class MovesTaskset(vf.Taskset[MoveTask, MovesConfig]):
    def load(self) -> Iterator[MoveTask]:
        """Yield a task for each number of stones, many times."""
        for index in range(512):
            stones = 2 + index % (self.config.most_stones - 1)
            prompt = f"{stones} stones are left. Take 1, 2 or 3. How many do you take?"
            yield MoveTask(MoveData(name=f"move-{index}", prompt=prompt, stones=stones), self.config.task)


@functools.cache
def _client() -> httpx.AsyncClient:
    return httpx.AsyncClient(verify=False, timeout=60)


class TalkConfig(vf.HarnessConfig):
    pass


class Talk(vf.Harness[TalkConfig]):
    """Say what is to be said, and hear the answer."""

    APPENDS_SYSTEM_PROMPT: ClassVar[bool] = True
    SUPPORTS_RESUME: ClassVar[bool] = True
    EXECUTES_CODE: ClassVar[bool] = False
    NEEDS_CONTAINER: ClassVar[bool] = False

    async def launch(
        self,
        ctx: Any,
        trace: Any,
        runtime: Any,
        endpoint: str,
        secret: str,
        mcp_urls: dict[str, str],
        data: Any,
        tool_interception_url: str | None = None,
    ) -> ProgramResult:
        """Send one request."""
        system, prompt = self.resolve_prompt(data)
        said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt or [])
        messages = [*([{"role": "system", "content": system}] if system else []), *said]
        answer = await _client().post(
            f"{endpoint}/chat/completions",
            headers={"authorization": f"Bearer {secret}"},
            json={"model": ctx.model, "messages": messages},
        )
        is_well = answer.status_code == 200
        said_last = answer.json()["choices"][0]["message"]["content"] if is_well else ""
        return ProgramResult(exit_code=0 if is_well else 1, stdout=json.dumps(said_last), stderr=answer.text)


__all__ = ["MovesTaskset", "Talk"]
