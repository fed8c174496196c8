"""An endpoint with policies behind it whose model says what a test tells it to."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from areal_async.config.settings import EndpointSettings, SamplingSettings
from areal_async.inference.call_parser import EngineCallParser
from areal_async.rollout.endpoint.admission import AdmissionLimits
from areal_async.rollout.endpoint.policy import PolicyMaker, ServedPolicy
from areal_async.rollout.endpoint.server import AgentEndpoint
from areal_async.rollout.policy.generation import Generator
from areal_async.rollout.policy.text import TextCodec
from tests.unit.rollout.byte_model import ScriptedModel
from tests.unit.rollout.chat_templates import codec_with

END = 2
CALL = '<tool_call>{"name":"add","arguments":{"a":2,"b":3}}</tool_call>'
PARAMETERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
    "required": ["a", "b"],
}
QUESTION = [{"role": "user", "content": "2 and 3?"}]


def said(text: str, template: str = "hermes") -> list[int]:
    """A letter a token: what is said cannot be had back by tokenizing it again."""
    return [*(token for letter in text for token in codec_with(template).encode(letter)), END]


def speaker(*texts: str) -> ScriptedModel:
    return ScriptedModel(*(said(text) for text in texts))


@asynccontextmanager
async def served(
    model: Generator,
    *,
    template: str = "hermes",
    name: str = "uid",
    max_new_tokens: int = 99,
    call_parser: EngineCallParser | None = None,
    limits: AdmissionLimits | None = None,
    codec: TextCodec | None = None,
    **settings: Any,
) -> AsyncIterator[ServedPolicy]:
    """A policy with an address, at an endpoint of its own with these settings."""
    async with AgentEndpoint(EndpointSettings(**settings), limits=limits) as endpoint:
        sampling = SamplingSettings(max_new_tokens=max_new_tokens)
        maker = PolicyMaker(
            generator=model, codec=codec or codec_with(template), endpoint=endpoint, call_parser=call_parser
        )
        yield maker.policy(sampling, name)


@asynccontextmanager
async def client(policy: ServedPolicy, **headers: str | bytes) -> AsyncIterator[httpx.AsyncClient]:
    """A client without an SDK."""
    given = headers or {"authorization": f"Bearer {policy.api_key}"}
    async with httpx.AsyncClient(base_url=policy.base_url, headers=given, trust_env=False, timeout=100) as http:
        yield http


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": QUESTION, **fields}
