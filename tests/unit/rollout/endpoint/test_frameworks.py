"""Frameworks get the answers they ask for from a real engine, and its tokens are recorded.

They are programs in environments of their own (``make agents``, and ``make agents-more`` for the nightly ones), as they
come from their index: each is given an address and a key, and writes what it was told in each of its modes. The table
of the documents has these modes and the pinned versions, or the test fails.
"""

import itertools
import json
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import pytest

from areal_async.config.policy import GRAMMARS
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
MORE_PYTHON = Path(os.environ.get("NEED_MORE_AGENTS", ".venv-agents-more/bin/python"))
CODING_AGENTS = Path(os.environ.get("NEED_CODING_AGENTS", ".agents-cli/node_modules/.bin"))
REPOSITORY = Path(__file__).parents[4]
README = REPOSITORY / "areal_async" / "rollout" / "endpoint" / "README.md"
QUIET = {
    "LANGSMITH_TRACING": "false",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_LOCAL_ANTHROPIC_BETA_HEADERS": "True",
    "HF_HUB_OFFLINE": "1",
    "PYTHONWARNINGS": "ignore",
}
"""What keeps frameworks from calling home."""


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
    return find_program(AGENTS_PYTHON, "NEED_AGENTS", "make agents")


def find_program(path: Path, variable: str, maker: str) -> str:
    """Return a program of an environment; without it, skip, or fail where the variable says that it has to be there."""
    found = shutil.which(path)
    if found is None:
        message = f"no agents: {path} is not there; make it with {maker}"
        pytest.fail(message) if variable in os.environ else pytest.skip(message)
    return str(Path(found).absolute())  # it is started in another folder


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


def addressed(policy: ServedPolicy, home: Path) -> dict[str, str]:
    """What a program that is started has in its environment."""
    return {
        **QUIET,
        "PATH": os.environ["PATH"],
        "HOME": str(home),
        "OPENAI_BASE_URL": f"{policy.base_url}/v1",
        "OPENAI_API_KEY": policy.api_key,
        "ANTHROPIC_BASE_URL": policy.base_url,
        "ANTHROPIC_API_KEY": policy.api_key,
    }


async def told(python: str, program: str, policy: ServedPolicy, home: Path) -> dict[str, Any]:
    """Run a program; return what it wrote."""
    done = await anyio.run_process(
        [python, str(AGENTS / program)], env=addressed(policy, home), check=False, stdin=subprocess.DEVNULL
    )
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
        assert turn.is_steered == any(name in params for name in GRAMMARS)


def assert_paint(value: Any) -> None:
    assert value["colour"] in ("red", "green")
    assert value["coats"] in (1, 2, 3)


def rows_of(framework: str) -> dict[str, tuple[str, str]]:
    """Return the version and the outcome that the documents have for each mode of a framework."""
    _, _, text = README.read_text(encoding="utf-8").partition("<!-- frameworks -->\n")
    lines = itertools.takewhile(lambda line: line.startswith("|"), text.splitlines())
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines][2:]
    return {mode: (version, outcome) for name, version, mode, outcome in rows if name == framework}


def version_of(package: str) -> str:
    """Return the version that is pinned."""
    pins = [path.read_text().splitlines() for path in sorted((REPOSITORY / "tools").glob("agents*.txt"))]
    found = {
        line.rpartition(sign)[2]
        for lines in pins
        for line in lines
        for sign in ("==", "@")
        if line.startswith(package + sign)
    }
    (version,) = found
    return version


def assert_documented(framework: str, answers: Mapping[str, Any]) -> None:
    """The documents say of each mode what came of it here, and of no other mode."""
    rows = rows_of(framework)
    assert rows.keys() == answers.keys()
    for mode, (version, outcome) in rows.items():
        is_refused = isinstance(answers[mode], dict) and "refused" in answers[mode]
        assert version == version_of(framework)
        assert outcome.startswith("refused" if is_refused else "works"), mode


async def test_openai(python: str, engine: Server, folder: Path, tmp_path: Path) -> None:
    async with served_by(engine, folder) as (policy, noting):
        answers = await told(python, "openai_modes.py", policy, tmp_path)

        assert_documented("openai", answers)
        assert_paint(answers["Chat Completions parse"])
        assert_paint(answers["Responses parse"])
        assert answers["Chat Completions tool_choice required"].keys() == {"a", "b"}
        assert len(policy.turns) == len(answers) - 1
        assert_engine_s_own(policy, noting, engine)


async def test_anthropic(python: str, engine: Server, folder: Path, tmp_path: Path) -> None:
    async with served_by(engine, folder) as (policy, noting):
        answers = await told(python, "anthropic_modes.py", policy, tmp_path)

        assert_documented("anthropic", answers)
        for mode in ("tool_choice any", "tool_choice tool", "parse"):
            assert_paint(answers[f"Messages {mode}"])
        assert answers["count_tokens"] == len(policy.turns[0].prompt_ids)
        assert len(policy.turns) == len(answers) - 1
        assert_engine_s_own(policy, noting, engine)


async def test_openai_agents(python: str, engine: Server, folder: Path, tmp_path: Path) -> None:
    async with served_by(engine, folder) as (policy, noting):
        answers = await told(python, "openai_agents_modes.py", policy, tmp_path)

        assert_documented("openai-agents", answers)
        for name, value in answers.items():
            if "output_type" in name:
                assert_paint(value)
            if "function tools" in name:
                assert value[:2] == ["tool_call_item", "tool_call_output_item"]
        assert len(policy.turns) == 10
        assert_engine_s_own(policy, noting, engine)


async def test_pydantic_ai(python: str, engine: Server, folder: Path, tmp_path: Path) -> None:
    async with served_by(engine, folder) as (policy, noting):
        answers = await told(python, "pydantic_ai_modes.py", policy, tmp_path)

        assert_documented("pydantic-ai-slim", answers)
        for name, value in answers.items():
            assert value == {"colour": "any"} if "Prompted" in name else assert_paint(value) is None, name
        assert len(answers) == len(policy.turns) == 6
        assert_engine_s_own(policy, noting, engine)


async def test_langchain(python: str, engine: Server, folder: Path, tmp_path: Path) -> None:
    async with served_by(engine, folder) as (policy, noting):
        answers = await told(python, "langchain_modes.py", policy, tmp_path)

        assert_documented("langchain-openai", answers)
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


async def test_langgraph(python: str, engine: Server, folder: Path, tmp_path: Path) -> None:
    async with served_by(engine, folder) as (policy, noting):
        answers = await told(python, "langgraph_modes.py", policy, tmp_path)

        assert_documented("langgraph", answers)
        for value in answers.values():
            assert_paint(value)
        assert len(policy.turns) == 2 * len(answers)
        assert_engine_s_own(policy, noting, engine)


async def test_instructor(python: str, engine: Server, folder: Path, tmp_path: Path) -> None:
    async with served_by(engine, folder) as (policy, noting):
        answers = await told(python, "instructor_modes.py", policy, tmp_path)

        assert_documented("instructor", answers)
        for name, value in answers.items():
            assert value == {"colour": "any"} if name == "JSON" else assert_paint(value) is None, name
        assert len(answers) == len(policy.turns) == 5
        assert_engine_s_own(policy, noting, engine)


async def test_smolagents(python: str, engine: Server, folder: Path, tmp_path: Path) -> None:
    async with served_by(engine, folder) as (policy, noting):
        answers = await told(python, "smolagents_modes.py", policy, tmp_path)

        assert_documented("smolagents", answers)
        assert all(isinstance(value["answer"], str) for value in answers.values())
        assert len(policy.turns) >= 2 * len(answers)
        assert_engine_s_own(policy, noting, engine)


@pytest.mark.nightly
@pytest.mark.parametrize("framework", ["litellm", "dspy", "inspect_ai"])
async def test_frameworks_that_are_tried_at_night(engine: Server, folder: Path, tmp_path: Path, framework: str) -> None:
    python = find_program(MORE_PYTHON, "NEED_MORE_AGENTS", "make agents-more")
    async with served_by(engine, folder) as (policy, noting):
        answers = await told(python, f"{framework}_modes.py", policy, tmp_path)

        assert_documented(framework, answers)
        for name, value in answers.items():
            if isinstance(value, dict):
                assert_paint(value)
            if "response_schema" in name:
                assert_paint(json.loads(value))
        assert len(policy.turns) >= len(answers)
        assert_engine_s_own(policy, noting, engine)


CODING: Mapping[str, tuple[str, list[str]]] = {
    "@anthropic-ai/claude-code": (
        "claude",
        [
            "--bare", "--print", "--tools", "Bash", "--system-prompt", "Answer.", "--model", "claude-opus-4-5",
            "Two and three?",
        ],
    ),
    "@openai/codex": (
        "codex",
        [
            "exec", "--skip-git-repo-check", "--config", "model_provider=areal", "--config", 'web_search="disabled"',
            "--config", "features.multi_agent=false", "--config", "features.goals=false", "--model", "gpt-5",
            "Two and three?",
        ],
    ),
}  # fmt: skip
"""Package -> program, and how it is run on one question."""


@pytest.mark.nightly
@pytest.mark.parametrize("package", CODING)
async def test_coding_agents(engine: Server, folder: Path, tmp_path: Path, package: str) -> None:
    """Of the two, codex has its address from its settings alone."""
    name, arguments = CODING[package]
    program = find_program(CODING_AGENTS / name, "NEED_CODING_AGENTS", "make agents-more")
    async with served_by(engine, folder) as (policy, noting):
        (tmp_path / ".codex").mkdir()
        (tmp_path / "instructions.md").write_text("Answer.")
        (tmp_path / ".codex" / "config.toml").write_text(
            f'model_instructions_file = "{tmp_path}/instructions.md"\n[model_providers.areal]\nname = "areal"\n'
            f'base_url = "{policy.base_url}/v1"\nenv_key = "OPENAI_API_KEY"\nwire_api = "responses"\n'
        )
        environment = {**addressed(policy, tmp_path), "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}
        done = await anyio.run_process(
            [program, *arguments], env=environment, cwd=tmp_path, check=False, stdin=subprocess.DEVNULL
        )

        assert_documented(package, {"one question": done.returncode})
        assert policy.turns, (done.stdout + done.stderr).decode()[-4000:]
        assert policy.failures == []
        assert_engine_s_own(policy, noting, engine)
