"""An environment of the tests' own: guess a number; the tasks are numbers from ``first`` on."""

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from areal_async.api import Policy
from areal_async.environments.environment import Environment, Options, note_metrics
from areal_async.protocol.types import Prompt

on_nodes: list[str] = []
"""What has been entered and left, by the names of the environments."""


class MadeOptions(Options):
    first: int = 0
    count: int = 2
    folder: str = ""
    nested: dict[str, int] = {}


class Made(Environment):
    def __init__(self, name: str, options: MadeOptions) -> None:
        self.name = name
        self.options = options

    def rows(self) -> Iterator[Mapping[str, Any]]:
        for number in range(self.options.first, self.options.first + self.options.count):
            yield {"task_id": f"{self.name}-{number}", "number": number}

    async def episode(self, prompt: Prompt, policy: Policy) -> float:
        reply = await policy.chat([{"role": "user", "content": prompt["task_id"]}])
        note_metrics(policy, {"length": len(reply.text)})
        return float(str(prompt["number"]) in reply.text)

    @asynccontextmanager
    async def on_node(self) -> AsyncIterator[None]:
        on_nodes.append(f"enter {self.name}")
        yield
        on_nodes.append(f"leave {self.name}")


def environment(name: str, options: Mapping[str, Any]) -> Environment:
    return Made(name, MadeOptions.read(options, what=f"made:{name}"))
