"""The embedded engine that the tests of this folder share with the contract suite."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.inference.embedded_engine import Server, restored


@pytest.fixture
def server(embedded_server: Server, models: list[Path]) -> Iterator[Server]:
    """The shared server, running, idle and with the first model's weights whatever the test did."""
    with restored(embedded_server, models[0]):
        yield embedded_server


@pytest.fixture(autouse=True)
def few_positions_are_worth_a_band(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' sequences are few and short: else all of them would attend together."""
    monkeypatch.setattr("areal_async.inference.embedded.engine.compute.bands._LEAST_SAVED", 1)
