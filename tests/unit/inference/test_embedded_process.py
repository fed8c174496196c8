"""The engine's process starts with a sentence or not at all, stops when told, and never outlives its parent."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from areal_async.errors import UserError
from areal_async.inference.embedded.engine.lifecycle import bind_socket
from areal_async.inference.embedded.engine.options import EngineOptions
from areal_async.inference.embedded.engine.runner import load_runner
from areal_async.process.host import free_port
from tests.unit.inference.embedded_engine import Server, command, prompt_of

DEADLINE_S = 100.0


def run_to_its_end(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(arguments, capture_output=True, text=True, timeout=DEADLINE_S, check=False)


def assert_one_sentence(result: subprocess.CompletedProcess[str]) -> None:
    assert result.returncode == 2
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1


def test_a_missing_model_is_one_sentence_and_status_2(tmp_path: Path) -> None:
    assert_one_sentence(run_to_its_end(command(tmp_path / "nothing", free_port())))


def test_a_busy_port_is_one_sentence_and_status_2(models: list[Path]) -> None:
    with bind_socket("127.0.0.1", 0) as taken:
        taken.listen()
        result = run_to_its_end(command(models[0], taken.getsockname()[1]))

    assert_one_sentence(result)
    assert "cannot be bound" in result.stderr


def test_a_torn_model_is_one_sentence(models: list[Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((models[0] / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((models[0] / "model.safetensors").read_bytes()[:-1000])

    with pytest.raises(UserError, match=r"^model at .*: SafetensorError: [^\n]*$"):
        load_runner(EngineOptions(model_path=str(tmp_path), device="cpu"), tmp_path)


def test_sigterm_ends_open_streams_and_the_process(models: list[Path]) -> None:
    server = Server(models[0])
    with server.stream(prompt_of(5), max_new_tokens=450) as stream:
        stream.read(1)
        # Paused, the stream cannot end by itself.
        server.post("/pause_generation", mode="in_place")
        server.process.send_signal(signal.SIGTERM)
        stream.read()

    assert stream.meta["finish_reason"]["type"] == "abort"
    server.process.wait(timeout=DEADLINE_S)
    server.close()


def test_the_engine_dies_with_its_parent(models: list[Path]) -> None:
    engine = command(models[0], free_port())
    script = (
        f"import subprocess; child = subprocess.Popen({engine!r}, stdout=1); print(child.pid, flush=True); child.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        engine_fd = os.pidfd_open(int(parent.stdout.readline()))
        assert "server.started" in parent.stdout.readline()
        parent.kill()

    readable, _, _ = select.select([engine_fd], [], [], DEADLINE_S)
    os.close(engine_fd)
    assert readable, "the engine outlived its parent"


def test_the_process_ends_while_a_thread_waits_for_somebody_else() -> None:
    waiting = """
import asyncio, threading
from areal_async.inference.embedded.engine.lifecycle import call_in_thread
async def main():
    asyncio.get_running_loop().call_later(0.1, asyncio.current_task().cancel)
    await call_in_thread(threading.Event().wait)
try:
    asyncio.run(main())
except asyncio.CancelledError:
    print("cancelled")
"""
    result = subprocess.run(
        [sys.executable, "-c", waiting], capture_output=True, text=True, timeout=DEADLINE_S, check=True
    )

    assert result.stdout == "cancelled\n"
