"""``controller``, ``node`` and ``trainer``: the processes of a run, started by the launcher or by hand."""

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path

from areal_async.launch.run_directory import RunDirectory

MODULES = {
    "controller": "areal_async.controller.main",
    "node": "areal_async.rollout.main",
    "trainer": "areal_async.trainer.main",
}


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Run one role until it ends; it configures its own log, and what it raises ends the process."""
    directory = RunDirectory(Path(arguments.run_directory))
    settings = directory.read_settings()
    keywords = {"node_id": arguments.node_id} if arguments.verb == "node" else {}
    importlib.import_module(MODULES[arguments.verb]).run(
        settings, run_directory=directory.path, bus_url=directory.read_bus_url(), **keywords
    )
    return 0
