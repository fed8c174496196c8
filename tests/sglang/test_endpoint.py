"""The real SGLang behind the endpoint: what the official clients are told, three turns with tools, is recorded exactly.

The tests are those that the embedded engine passes; here only the engine is another.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sglang.conftest import SglangServer, find_sglang
from tests.unit.inference.embedded_engine import Server
from tests.unit.rollout.endpoint.test_engine_tokens import (
    folder,
    row,
    test_anthropic_messages,
    test_openai_chat,
    test_openai_responses,
)

__all__ = ["folder", "row", "test_anthropic_messages", "test_openai_chat", "test_openai_responses"]

pytestmark = [pytest.mark.anyio, pytest.mark.sglang, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Server]:
    find_sglang()
    server = SglangServer(folder)
    yield server
    server.close()
