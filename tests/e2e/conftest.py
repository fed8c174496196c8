"""What the tests of whole verbs share: one engine that serves the tiny model."""

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.unit.inference.embedded_engine import Server

TINY = Path(__file__).resolve().parents[2] / "configs" / "models" / "tiny"


@pytest.fixture(scope="session")
def engine() -> Iterator["Server"]:
    """Nobody changes its weights: a verb is given its address instead of starting a server of its own."""
    from tests.unit.inference.embedded_engine import Server

    server = Server(TINY)
    yield server
    server.close()
