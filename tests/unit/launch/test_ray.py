"""Which GPUs a process sees under Ray, and a host without Ray; the rest is shown with a real one, in ``tests/ray``."""

import sys
from pathlib import Path

import pytest

from areal_async.cli.main import main


def test_gpus_are_counted_among_those_that_a_host_has_given() -> None:
    pytest.importorskip("ray", reason="not installed; make ray")
    from areal_async.launch.ray import among

    given = ["4", "5", "MIG-7"]
    assert among(given, {"CUDA_VISIBLE_DEVICES": "0,2", "A": "1"}) == {"CUDA_VISIBLE_DEVICES": "4,MIG-7", "A": "1"}
    for kept in ({"CUDA_VISIBLE_DEVICES": ""}, {}):
        assert among(given, kept) == kept
    assert among([], {"CUDA_VISIBLE_DEVICES": ""}) == {"CUDA_VISIBLE_DEVICES": ""}


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
