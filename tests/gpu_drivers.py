"""Hosts with GPUs, as far as programs can tell: ``nvidia-smi`` answers what a test has it say."""

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from areal_async.process import host

Driver = Callable[..., None]
"""``driver(*lines)``: what the driver's program says from now on; without lines there is no such program."""


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Driver]:
    """Have the driver of a container say something, whose only GPU is the host's fourth."""
    programs, devices = tmp_path / "programs", tmp_path / "dev"
    programs.mkdir()
    devices.mkdir()
    for name in ("nvidia3", "nvidiactl", "nvidia-uvm"):
        (devices / name).touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(programs))
    monkeypatch.setattr(host, "DEVICES", devices)

    def say(*lines: str) -> None:
        program = programs / "nvidia-smi"
        program.unlink(missing_ok=True)
        if lines:
            program.write_text(f"#!/bin/sh\nprintf '%s\\n' {shlex.join(lines)}\n")
            program.chmod(0o755)
        host._driver_gpus.cache_clear()

    yield say
    host._driver_gpus.cache_clear()
