"""The policy that a workflow talks to: every call is streamed from a server and recorded token for token.

Invariant: what the model said is never tokenized again. Where a conversation goes on from a recorded
reply, the recorded tokens are the prompt, and only what was added since is tokenized.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from pydantic import ValidationError

from areal_async.contracts import Message, Reply
from areal_async.errors import WorkflowError
from areal_async.inference.pool import Server
from areal_async.rollout.text import TextCodec
from areal_async.settings import SamplingSettings
from areal_async.types import Turn


class Generator(Protocol):
    """What a policy needs of the inference client."""

    async def generate(
        self, prompt_ids: list[int], sampling_params: Mapping[str, Any], *, preferred: Server | None = None
    ) -> tuple[Turn, Server]: ...


class _Recorded(NamedTuple):
    """A chat turn, with what is needed to recognise a conversation that goes on from it."""

    messages: list[Message]
    """Up to and with the reply."""
    text: str
    """The prompt, rendered, and the reply's text."""
    turn: Turn


class RecordingPolicy:
    """One trajectory's ``contracts.Policy``."""

    def __init__(self, generator: Generator, codec: TextCodec, sampling: SamplingSettings, *, name: str) -> None:
        self._generator = generator
        self._codec = codec
        self._sampling = sampling
        self._name = name
        self._server: Server | None = None
        self._recorded: list[_Recorded] = []
        self.turns: list[Turn] = []
        self.reply_ids: list[str] = []

    async def chat(self, messages: Sequence[Message], **sampling: Any) -> Reply:
        """Answer a conversation."""
        params = self._sampling_params(sampling)
        messages = list(messages)
        text = self._codec.render(messages)
        turn, reply = await self._generate(self._prompt_ids(messages, text), params)
        self._recorded.append(_Recorded([*messages, reply.message], text + reply.text, turn))
        return reply

    async def complete(self, prompt: str | Sequence[int], **sampling: Any) -> Reply:
        """Go on from a text or from token ids."""
        params = self._sampling_params(sampling)
        ids = self._codec.encode(prompt, add_special_tokens=True) if isinstance(prompt, str) else list(prompt)
        return (await self._generate(ids, params))[1]

    async def _generate(self, prompt_ids: list[int], params: Mapping[str, Any]) -> tuple[Turn, Reply]:
        turn, self._server = await self._generator.generate(prompt_ids, params, preferred=self._server)
        self.turns.append(turn)
        text = self._codec.decode(turn.output_ids)
        reply_id = f"{self._name}.{len(self.turns)}"
        self.reply_ids.append(reply_id)
        return turn, Reply(
            id=reply_id,
            text=text,
            message={"role": "assistant", "content": text},
            token_ids=turn.output_ids,
            logprobs=turn.logprobs,
            finish_reason=turn.finish_reason,
        )

    def _prompt_ids(self, messages: list[Message], text: str) -> list[int]:
        """Tokenize a rendered conversation, keeping the tokens of the newest recorded reply that it goes on from.

        A template that rewrites what was said (drops the reasoning of earlier turns, say) does not extend the
        recorded text; then the whole is tokenized, and the trajectory gets one more sequence.
        """
        for recorded in reversed(self._recorded):
            if messages[: len(recorded.messages)] == recorded.messages and text.startswith(recorded.text):
                said = recorded.turn.output_ids
                added = self._codec.encode(text[len(recorded.text) :])
                if said and added and said[-1] == added[0] and said[-1] in self._codec.stop_token_ids:
                    added = added[1:]  # the template writes the end of turn that the model has said already
                return recorded.turn.prompt_ids + said + added
        return self._codec.encode(text)

    def _sampling_params(self, overrides: Mapping[str, Any]) -> dict[str, Any]:
        sampling = self._sampling
        if overrides:
            try:
                sampling = SamplingSettings.model_validate({**sampling.model_dump(), **overrides})
            except ValidationError as exc:
                problems = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in exc.errors())
                names = ", ".join(SamplingSettings.model_fields)
                raise WorkflowError(f"policy call: got bad sampling ({problems}), need any of {names}") from exc
        return sampling_params(sampling, self._codec.stop_token_ids)


def sampling_params(sampling: SamplingSettings, stop_token_ids: list[int]) -> dict[str, Any]:
    """Return SGLang's form of the settings."""
    params: dict[str, Any] = sampling.model_dump(exclude={"stop"})
    if sampling.stop:
        params["stop"] = list(sampling.stop)
    params["stop_token_ids"] = [] if sampling.ignore_eos else stop_token_ids
    return params
