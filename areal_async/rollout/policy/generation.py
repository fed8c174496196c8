"""From a prompt to turns: where they are generated, how many side by side, and how long they may be."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import anyio

from areal_async.errors import ContextFull
from areal_async.inference.pool import ServerHandle
from areal_async.inference.siblings import requests_of
from areal_async.protocol.types import Turn
from areal_async.rollout.policy.replies import ReplyRecord
from areal_async.rollout.policy.text import ContextRoom
from areal_async.rollout.user_code.task_scope import unscoped
from areal_async.vision.images import Image


class Generator(Protocol):
    """What a policy needs of the inference client."""

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: Mapping[str, Any],
        *,
        preferred: ServerHandle | None = None,
        on_tokens: Callable[[list[int]], None] | None = None,
        images: Sequence[Image] = (),
    ) -> tuple[Turn, ServerHandle]: ...


class SeededGenerator:
    """A generator whose every call draws by a seed of its own, the same for whoever makes the same calls in order.

    Where servers draw by the seed of a request (``inference.commands.draws_by_seed``).
    """

    def __init__(self, generator: Generator, key: str) -> None:
        self._generator = generator
        self._key = key
        self._num_calls = 0

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: Mapping[str, Any],
        *,
        preferred: ServerHandle | None = None,
        on_tokens: Callable[[list[int]], None] | None = None,
        images: Sequence[Image] = (),
    ) -> tuple[Turn, ServerHandle]:
        if sampling_params["temperature"]:
            digest = hashlib.sha256(f"{self._key}.{self._num_calls}".encode()).digest()
            sampling_params = {"sampling_seed": int.from_bytes(digest[:4]) >> 1, **sampling_params}
        self._num_calls += 1
        return await self._generator.generate(
            prompt_ids, sampling_params, preferred=preferred, on_tokens=on_tokens, images=images
        )


class TurnGenerator:
    """Has the turns of one policy generated, by a server that has the beginning of their prompt in its cache."""

    def __init__(self, generator: Generator, record: ReplyRecord) -> None:
        self.server: ServerHandle | None = None
        """The one that ended the last turn."""
        self._generator = generator
        self._record = record

    def rooms(self) -> list[ContextRoom]:
        """Return what is known of the room for a prompt: a trainer's packed row, and a server that was met."""
        row = self._record.max_sequence_tokens
        rooms = [] if row is None else [ContextRoom(row, "trainer.token_budget")]
        if self.server is not None and self.server.context_tokens is not None:
            rooms.append(ContextRoom(self.server.context_tokens, "inference.context_length or the model's"))
        return rooms

    async def generate(
        self,
        prompt_ids: list[int],
        params: Mapping[str, Any],
        num_turns: int = 1,
        *,
        on_tokens: Callable[[list[int]], None] | None = None,
        images: Sequence[Image] = (),
    ) -> list[Turn]:
        """Return ``num_turns`` completions of one prompt, generated side by side.

        Args:
            on_tokens: called with the tokens of a single one as they come.
            images: in the prompt, in the order of their tokens.

        Raises:
            ContextFull: not a token of an answer would fit into a packed row behind this prompt.
        """
        params = self._fitted(params, prompt_ids)
        turns: dict[int, Turn] = {}
        preferred = self.server

        async def generate_one(number: int) -> None:
            own = params
            if number and "sampling_seed" in params:  # else all would be the same
                own = {**params, "sampling_seed": params["sampling_seed"] + number}
            with unscoped(), requests_of(self._record.siblings):
                turns[number], self.server = await self._generator.generate(
                    prompt_ids, own, preferred=preferred, on_tokens=on_tokens, images=images
                )

        if num_turns == 1:
            await generate_one(0)
        else:
            async with anyio.create_task_group() as generating:
                for number in range(num_turns):
                    generating.start_soon(generate_one, number)
        return [turns[number] for number in range(num_turns)]

    def _fitted(self, params: Mapping[str, Any], prompt_ids: Sequence[int]) -> Mapping[str, Any]:
        """Ask for no longer an answer than fits a packed row behind this prompt; servers have bounds of their own.

        Raises:
            ContextFull: not a token of it would fit. No server has spent anything on it.
        """
        most = self._record.max_sequence_tokens
        if most is None:
            return params
        if len(prompt_ids) >= most:
            raise ContextFull(len(prompt_ids), most, "trainer.token_budget")
        return {**params, "max_new_tokens": min(params["max_new_tokens"], most - len(prompt_ids))}
