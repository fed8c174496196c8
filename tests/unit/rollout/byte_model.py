"""A tokenizer of bytes and a model that says what a test tells it to."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import anyio.lowlevel

from areal_async.inference.pool import ServerHandle
from areal_async.inference.request import ref_of
from areal_async.protocol.types import Turn, VersionSpan
from areal_async.rollout.policy.text import TextCodec
from areal_async.vision.images import Image

END = 256
END_TEXT = "<end>"


class ByteTokenizer:
    """Every byte is a token, and ``<end>`` is one more."""

    chat_template = "role:content<end>"

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], *, tools: object, add_generation_prompt: bool, tokenize: bool
    ) -> str:
        assert not tokenize
        text = "".join(f"{message['role']}:{message['content']}{END_TEXT}" for message in messages)
        return text + "assistant:" * add_generation_prompt

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        ids: list[int] = [0] if add_special_tokens else []
        for index, part in enumerate(text.split(END_TEXT)):
            ids += [END] * (index > 0) + list(part.encode())
        return ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        # 200 and above are other ways to write a: what is said cannot be had back from its text.
        end = b"" if skip_special_tokens else END_TEXT.encode()
        return b"".join(end if token == END else bytes([97 if token >= 200 else token]) for token in token_ids).decode()


class ScriptedModel:
    """Answers each call with the next of ``answers``, and remembers the calls."""

    def __init__(self, *answers: list[int], version: str = "1-0", finish_reason: str = "stop") -> None:
        self.answers = list(answers)
        self.calls: list[tuple[list[int], Mapping[str, Any]]] = []
        self.seen: list[list[Image]] = []
        """images of each of ``calls``"""
        self.preferred: list[ServerHandle | None] = []
        self.server = ServerHandle("s0")
        self.version = version
        self.finish_reason = finish_reason

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: Mapping[str, Any],
        *,
        preferred: ServerHandle | None = None,
        on_tokens: Callable[[list[int]], None] | None = None,
        images: Sequence[Image] = (),
    ) -> tuple[Turn, ServerHandle]:
        self.calls.append((prompt_ids, sampling_params))
        self.seen.append(list(images))
        self.preferred.append(preferred)
        output_ids = self.answers.pop(0)
        for token in output_ids if on_tokens else []:
            await anyio.lowlevel.checkpoint()
            on_tokens([token])
        turn = Turn(
            prompt_ids=prompt_ids,
            output_ids=output_ids,
            logprobs=[-1.0] * len(output_ids),
            spans=[VersionSpan(version=self.version, start=0, end=len(output_ids))],
            oldest=self.version,
            finish_reason=self.finish_reason,
            images=[ref_of(image) for image in images],
        )
        return turn, self.server


def codec() -> TextCodec:
    return TextCodec(ByteTokenizer(), stop_token_ids=[END], vocab_size=END + 1)
