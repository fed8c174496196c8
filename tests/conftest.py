"""What tests of several packages share: their event loops, a real broker for each that asks for one, one engine."""

from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis
import pytest

from areal_async.bus import Bus, EmbeddedBroker, Role, declare, open_bus
from areal_async.config.settings import BusSettings, RunSettings, Settings
from areal_async.process.gc_pauses import importing
from tests.brokers import CONNECT_DEADLINE_S, OpenRole, as_operator, running_broker
from tests.gpu_drivers import driver as driver
from tests.loops import anyio_backend as anyio_backend
from tests.loops import loop_options as loop_options
from tests.loops import run_on_both
from tests.quiet import logging_as_before

if TYPE_CHECKING:
    from areal_async.trainer.engine.parallel.ranks import Ranks
    from tests.unit.inference.embedded_engine import Server

ROOT = Path(__file__).resolve().parents[1]
BEGUN_FIRST = (
    "tests/e2e/test_guides.py",
    "tests/e2e/test_operating.py",
    "tests/e2e/test_run.py",
    "tests/e2e/test_workflows.py",
    "tests/e2e/test_starts.py",
    "tests/e2e/test_mixed.py",
    "tests/unit/trainer/engine/test_compiled.py",
    "tests/unit/trainer/test_measured_memory.py",
    "tests/unit/trainer/test_alone.py",
    "tests/unit/trainer/test_traced_layouts.py",
)
"""Files that take longest, of each suite: begun late, they would leave the other processes nothing to do at the end."""

# How long an example takes says how busy the machine is.
hypothesis.settings.register_profile("untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("untimed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--both-loops", action="store_true", help="run every async test on asyncio's own loop too")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import what all tests need without looking for garbage; later looks, of tests that ask for some, leave it out."""
    with importing():
        return (yield)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {ROOT / name: place for place, name in enumerate(BEGUN_FIRST)}
    items.sort(key=lambda item: places.get(item.path, len(places)))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    run_on_both(metafunc)


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    with logging_as_before():
        yield


@pytest.fixture(scope="session")
def ranks() -> "Iterator[Ranks]":
    """Return the only rank of a trainer: a process has one for all of its tests, as torch allows no second one."""
    from areal_async.trainer.engine.parallel.ranks import joined_ranks

    with joined_ranks(deadline_s=100.0) as ranks:
        yield ranks


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    """Settings of a run in a directory of its own; a test module overrides this fixture to change them."""
    return Settings(
        run=RunSettings(name="test", directory=tmp_path),
        bus=BusSettings(operation_deadline_s=60.0, max_disk_bytes=8 << 30),
    )


@pytest.fixture
async def broker(anyio_backend: Any, settings: Settings) -> AsyncIterator[EmbeddedBroker]:
    """The broker of ``settings``, with everything declared."""
    async with running_broker(settings) as broker:
        async with as_operator(broker, settings) as bus:
            await declare(bus, settings)
        yield broker


@pytest.fixture
async def open_role(broker: EmbeddedBroker, settings: Settings) -> AsyncIterator[OpenRole]:
    """``await open_role(Role.NODE)`` connects one more process of a role; closed when the test ends."""
    async with AsyncExitStack() as stack:

        async def connect(role: Role, instance: str = "0") -> Bus:
            return await stack.enter_async_context(
                open_bus(
                    broker.url,
                    names=settings.names,
                    role=role,
                    instance=instance,
                    credentials=broker.credentials(role),
                    connect_deadline_s=CONNECT_DEADLINE_S,
                    operation_deadline_s=settings.bus.operation_deadline_s,
                )
            )

        yield connect


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two tiny models that differ in nothing but their weights."""
    from tests.unit.inference.embedded_engine import build_model  # torch, for seconds: most tests need none

    return [build_model(tmp_path_factory.mktemp(f"model{seed}"), seed=seed) for seed in range(2)]


@pytest.fixture(scope="session")
def embedded_server(models: list[Path]) -> Iterator["Server"]:
    """One process of the embedded engine for the whole session; each folder's ``server`` leaves it as it was."""
    from tests.unit.inference.embedded_engine import Server

    server = Server(models[0])
    yield server
    server.close()
