"""One server process of each kind for the whole session: the embedded engine, and the real SGLang where it is."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_async.config.settings import InferenceSettings, ModelSettings, Settings
from areal_async.inference.commands import server_command
from areal_async.process.parent_death import guarded
from tests.unit.inference.embedded_engine import Server, restored

SGLANG_PYTHON = Path(os.environ.get("NEED_SGLANG", ".venv-sglang/bin/python"))
"""Named in the environment: its tests fail instead of being skipped where it is not there."""


class SglangServer(Server):
    """The real SGLang, started with our launcher's command line."""

    def start(self, model_path: Path, port: int, *flags: str) -> subprocess.Popen[bytes]:
        settings = Settings(
            model=ModelSettings(path=str(model_path), dtype="float32"),
            inference=InferenceSettings(backend="sglang", python=SGLANG_PYTHON, stream_interval=1, flags=flags),
        )
        command = server_command(settings, server_id="contract", index=0)
        return subprocess.Popen(guarded(command.on_port(port)), env={**os.environ, **command.environment})


def find_sglang() -> Path:
    """Return the interpreter of SGLang's environment; without one, skip, or fail where it is needed."""
    if shutil.which(SGLANG_PYTHON) is None:
        message = f"no real SGLang: {SGLANG_PYTHON} is not there; build it with make test-sglang"
        pytest.fail(message) if "NEED_SGLANG" in os.environ else pytest.skip(message)
    return SGLANG_PYTHON


@pytest.fixture(scope="session", params=["embedded", pytest.param("sglang", marks=pytest.mark.sglang)])
def shared_server(request: pytest.FixtureRequest, models: list[Path]) -> Iterator[Server]:
    if request.param == "embedded":
        yield request.getfixturevalue("embedded_server")
        return
    find_sglang()
    server = SglangServer(models[0])
    yield server
    server.close()


@pytest.fixture
def server(shared_server: Server, models: list[Path]) -> Iterator[Server]:
    """The shared server, running, idle and with the first model's weights whatever the test did."""
    with restored(shared_server, models[0]):
        yield shared_server
