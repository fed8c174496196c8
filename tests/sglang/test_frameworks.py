"""The real SGLang behind the endpoint: frameworks get structured answers from it, and its tokens are recorded.

The tests are those that the embedded engine passes; here only the engine is another.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sglang.conftest import SglangServer, find_sglang
from tests.unit.inference.embedded_engine import Server
from tests.unit.rollout.endpoint.test_frameworks import (
    folder,
    python,
    test_anthropic,
    test_instructor,
    test_langchain,
    test_langgraph,
    test_openai,
    test_openai_agents,
    test_pydantic_ai,
    test_smolagents,
)

__all__ = [
    "folder",
    "python",
    "test_anthropic",
    "test_instructor",
    "test_langchain",
    "test_langgraph",
    "test_openai",
    "test_openai_agents",
    "test_pydantic_ai",
    "test_smolagents",
]

pytestmark = [pytest.mark.anyio, pytest.mark.sglang, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Server]:
    find_sglang()
    server = SglangServer(folder)
    yield server
    server.close()
