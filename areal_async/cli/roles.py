"""``controller``, ``node`` and ``trainer``: the processes of a run, started by the launcher or by hand.

``node --join`` is a launcher of its own, for one node of a run that lives elsewhere.
"""

import argparse
import importlib
from collections.abc import Sequence
from pathlib import Path

from areal_async.errors import UserError
from areal_async.launch.run_directory import RunDirectory
from areal_async.process import stacks
from areal_async.process.gc_pauses import importing
from areal_async.process.plain_text import keep_output_plain

MODULES = {
    "controller": "areal_async.controller.main",
    "node": "areal_async.rollout.main",
    "trainer": "areal_async.trainer.main",
}


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Run one role until it ends; it configures its own log, and what it raises ends the process."""
    if arguments.verb == "node" and arguments.join is not None:
        status: int = importlib.import_module("areal_async.cli.join").run(arguments, overrides)
        return status
    if arguments.run_directory is None:
        raise UserError("node: got neither --run-directory nor --join; need the broker's URL with --join, and --run")
    if overrides:
        raise UserError(f"{overrides[0]}: got it without --join; the run's own settings hold for its own nodes")
    keywords = {"node_id": arguments.node_id} if arguments.verb == "node" else {}
    if None in keywords.values():
        raise UserError("--node-id: got none, need the node's own among those of the run")
    directory = RunDirectory(Path(arguments.run_directory))
    settings = directory.read_settings()
    stacks.hold()
    keep_output_plain()
    with importing():
        module = importlib.import_module(MODULES[arguments.verb])
    module.run(settings, run_directory=directory.path, bus_url=directory.read_bus_url(), **keywords)
    return 0
