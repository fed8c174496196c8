"""``pause``, ``resume``, ``stop``: orders to a live run. Any NATS client can give the same ones (``bus/README.md``)."""

import argparse
import getpass
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import anyio

from areal_async.bus import Bus, Report, ask_service
from areal_async.errors import BusError, UnansweredError, UserError
from areal_async.launch.run import NotLiveError, visit_live
from areal_async.launch.run_directory import RunDirectory, find_run
from areal_async.process.stdio import say
from areal_async.protocol.fields import MAX_EXACT
from areal_async.protocol.run_state import RunState
from areal_async.protocol.subjects import RUN_STATE
from areal_async.telemetry import log

ANSWER_DEADLINE_S = 10.0
LOOK_S = 2.0
"""For the broker to say how the run is, where nobody has answered."""
DONE = {
    "pause": "paused: what was admitted is finished, nothing more is admitted; resume goes on",
    "resume": "resumed",
    "stop": "stopping: the trainer finishes its step and checkpoints; the same run command goes on from there",
}


def run(arguments: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Give one order and say that the controller has it."""
    log.quieten()
    directory = find_run(arguments.run)
    order = str(arguments.verb)

    changes = [change_of(text) for text in getattr(arguments, "set", ())]

    async def act() -> None:
        async with visit_live(directory) as (settings, bus):
            body = {"by": arguments.by or who(), "reason": arguments.reason or ""}
            for setting, value in changes:
                change = body | {"setting": setting, "value": value}
                now = await give(directory, bus, "set", change)
                say(f"run {settings.run.name}: {setting} is {now.get(setting, value):.12g} now")
            await give(directory, bus, order, body)
            say(f"run {settings.run.name} {DONE[order]}")

    anyio.run(act, backend_options={"use_uvloop": True})
    return 0


async def give(directory: RunDirectory, bus: Bus, order: str, body: Mapping[str, Any]) -> Report:
    """Give one order to a live run, and return what the controller answers.

    Raises:
        UserError: the controller refuses.
        UnansweredError: nobody answers.
        NotLiveError: the run has ended.
    """
    try:
        return await ask_service(bus, bus.names.control(order), body, deadline_s=ANSWER_DEADLINE_S)
    except (UnansweredError, BusError) as exc:
        if not await _has_ended(directory, bus):
            raise
        run = bus.names.run
        raise NotLiveError(f"run {run}: has ended, and takes no orders; status --run {run} tells how") from exc


async def _has_ended(directory: RunDirectory, bus: Bus) -> bool:
    """Say whether nobody runs the run any more, or its processes have ended and its launcher is about to."""
    state: RunState | None = None
    if directory.is_live:
        with anyio.move_on_after(LOOK_S), suppress(BusError):
            state, _ = await bus.get(RUN_STATE, RunState)
    return not directory.is_live or (state is not None and state.state != "running")


def change_of(text: str) -> tuple[str, float]:
    """Return the setting and its value in ``--set SETTING=VALUE``.

    Raises:
        UserError: it is none, or infinite, or so large that a whole number would not be exact.
    """
    setting, _, value = text.partition("=")
    try:
        number = int(value) if value.lstrip("-").isdecimal() else float(value)
    except ValueError as exc:
        raise UserError(f"--set: got {text:.100}, need SETTING=NUMBER, as trainer.lr=1e-6") from exc
    if not abs(number) <= MAX_EXACT:
        raise UserError(f"--set: got {text:.100}, need a finite number of at most {MAX_EXACT} either way")
    return setting, number


def who() -> str:
    """Return the operator as the audit record names them."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without a user table
        user = "operator"
    return f"{user}@{socket.gethostname()}"
