"""Which GPUs a process sees under Ray, and a host without Ray; the rest is shown with a real one, in ``tests/ray``."""

import sys
import threading
from pathlib import Path

import anyio
import pytest

from areal_async.cli.main import main
from areal_async.launch.remote import AgentLostError
from tests.brokers import until


def test_gpus_are_counted_among_those_that_a_host_has_given() -> None:
    pytest.importorskip("ray", reason="not installed; make ray")
    from areal_async.launch.ray import among

    given = ["4", "5", "MIG-7"]
    assert among(given, {"CUDA_VISIBLE_DEVICES": "0,2", "A": "1"}) == {"CUDA_VISIBLE_DEVICES": "4,MIG-7", "A": "1"}
    for kept in ({"CUDA_VISIBLE_DEVICES": ""}, {}):
        assert among(given, kept) == kept
    assert among([], {"CUDA_VISIBLE_DEVICES": ""}) == {"CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.anyio
async def test_what_ray_does_not_answer_is_asked_again_and_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray", reason="not installed; make ray")
    from areal_async.launch import ray

    monkeypatch.setattr(ray, "CALL_S", 0.05)
    threads, answer = anyio.CapacityLimiter(1), threading.Event()
    for _ in range(3):
        with pytest.raises(AgentLostError, match=r"Ray was asked where it is, and has not answered within 0.05 s"):
            await ray.ask("where it is", answer.wait, threads)
    answer.set()
    await until(lambda: threads.borrowed_tokens == 0)
    assert await ray.ask("where it is", lambda: "there", threads) == "there"


def test_without_ray_a_run_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    words = ["run", "workflows/gsm8k.py", "--run.directory", str(tmp_path), "--launch.backend", "ray"]

    assert main(words) == 2
    assert capsys.readouterr().err.startswith(
        "launch.backend: got ray, need the package ray; pip install 'areal-async["
    )
    assert not list(tmp_path.iterdir())
