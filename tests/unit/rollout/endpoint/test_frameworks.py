"""Frameworks that ask for structured answers get them from a real engine, and its tokens are recorded.

They are programs in an environment of their own (``make agents``), as they come from the package index: each is given
an address and a key, and writes what it was told.
"""

import json
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from areal_async.config.settings import InferenceSettings, SamplingSettings
from areal_async.inference.client import InferenceClient
from areal_async.inference.pool import ServerHandle, ServerPool
from areal_async.protocol.types import Turn
from areal_async.rollout.endpoint.policy import PolicyMaker, ServedPolicy
from areal_async.rollout.endpoint.server import AgentEndpoint
from areal_async.rollout.policy.generation import Generator
from areal_async.rollout.policy.text import load_codec
from areal_async.vision.images import Image
from tests.unit.inference.embedded_engine import Server
from tests.unit.rollout.endpoint.terse import build_terse

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]

AGENTS = Path(__file__).parent / "agents"
AGENTS_PYTHON = Path(os.environ.get("NEED_AGENTS", ".venv-agents/bin/python"))
"""Named in the environment: its tests fail instead of being skipped where it is not there."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_terse(tmp_path_factory.mktemp("terse"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Server]:
    server = Server(folder)
    yield server
    server.close()


@pytest.fixture
def python() -> str:
    """The interpreter of the agents' environment."""
    found = shutil.which(AGENTS_PYTHON)
    if found is None:
        message = f"no agents: {AGENTS_PYTHON} is not there; make it with make agents"
        pytest.fail(message) if "NEED_AGENTS" in os.environ else pytest.skip(message)
    return found


class Noting:
    """A generator that keeps what every turn was asked with."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator
        self.calls: list[tuple[Turn, Mapping[str, Any]]] = []

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: Mapping[str, Any],
        *,
        preferred: ServerHandle | None = None,
        on_tokens: Callable[[list[int]], None] | None = None,
        images: Sequence[Image] = (),
    ) -> tuple[Turn, ServerHandle]:
        turn, server = await self._generator.generate(
            prompt_ids, sampling_params, preferred=preferred, on_tokens=on_tokens, images=images
        )
        self.calls.append((turn, sampling_params))
        return turn, server


@asynccontextmanager
async def served_by(engine: Server, folder: Path) -> AsyncIterator[tuple[ServedPolicy, Noting]]:
    pool = ServerPool(["s0"], deadline_s=60)
    pool.admit(pool.servers["s0"], url=str(engine.http.base_url).rstrip("/"), version="0-0")
    async with AsyncExitStack() as stack:
        client = Noting(
            await stack.enter_async_context(
                InferenceClient(pool, InferenceSettings(), max_streams=16, vocab_size=1 << 20)
            )
        )
        endpoint = await stack.enter_async_context(AgentEndpoint())
        sampling = SamplingSettings(max_new_tokens=200, temperature=0.0)
        maker = PolicyMaker(generator=client, codec=load_codec(str(folder)), endpoint=endpoint)
        yield maker.policy(sampling, "uid"), client


async def told(python: str, program: str, policy: ServedPolicy) -> dict[str, Any]:
    """Run a program; return what it wrote."""
    environment = {
        "PATH": os.environ["PATH"],
        "OPENAI_BASE_URL": f"{policy.base_url}/v1",
        "OPENAI_API_KEY": policy.api_key,
        "LANGSMITH_TRACING": "false",
    }
    done = await anyio.run_process([python, str(AGENTS / program)], env=environment, check=False)
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    return dict(json.loads(line) for line in done.stdout.decode().splitlines())


def assert_engine_s_own(policy: ServedPolicy, noting: Noting, engine: Server) -> None:
    """What is recorded is what the engine says to the same prompt under the same grammar."""
    assert len(policy.turns) == len(noting.calls)
    for turn, (generated, params) in zip(policy.turns, noting.calls, strict=True):
        assert turn is generated
        assert turn.finish_reason == "stop"
        answer = engine.generate(turn.prompt_ids, **params)
        assert turn.output_ids == answer["output_ids"]
        assert turn.is_steered


def assert_paint(value: Any) -> None:
    assert value["colour"] in ("red", "green")
    assert value["coats"] in (1, 2, 3)


async def test_pydantic_ai(python: str, engine: Server, folder: Path) -> None:
    async with served_by(engine, folder) as (policy, noting):
        answers = await told(python, "pydantic_ai_modes.py", policy)

        for name, value in answers.items():
            assert value == {"colour": "any"} if "Prompted" in name else assert_paint(value) is None, name
        assert len(answers) == len(policy.turns) == 6
        assert_engine_s_own(policy, noting, engine)


async def test_langchain(python: str, engine: Server, folder: Path) -> None:
    async with served_by(engine, folder) as (policy, noting):
        answers = await told(python, "langchain_modes.py", policy)

        for name, value in answers.items():
            if "tool_choice" in name:
                assert {*value} == {"a", "b"}
                assert {*value.values()} <= {1, 2, 3}
            elif "json_mode" in name:
                assert isinstance(value, dict)
            else:
                assert_paint(value)
        assert len(answers) == len(policy.turns) == 18
        assert_engine_s_own(policy, noting, engine)


async def test_instructor(python: str, engine: Server, folder: Path) -> None:
    async with served_by(engine, folder) as (policy, noting):
        answers = await told(python, "instructor_modes.py", policy)

        for name, value in answers.items():
            assert value == {"colour": "any"} if name == "JSON" else assert_paint(value) is None, name
        assert len(answers) == len(policy.turns) == 5
        assert_engine_s_own(policy, noting, engine)


async def test_smolagents(python: str, engine: Server, folder: Path) -> None:
    async with served_by(engine, folder) as (policy, noting):
        answers = await told(python, "smolagents_modes.py", policy)

        assert len(answers) == 2
        assert all(isinstance(value["answer"], str) for value in answers.values())
        assert len(policy.turns) >= 2
        assert_engine_s_own(policy, noting, engine)
