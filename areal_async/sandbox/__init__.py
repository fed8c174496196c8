"""Model-written programs, each in a fresh process that can reach nothing and leaves nothing behind.

    async with Sandbox(size=2) as sandbox:
        execution = await sandbox.run("print(sum(map(int, input().split())))", stdin=b"1 2")
        assert execution.stdout == b"3\\n"

    async with sandbox() as box:  # one that lasts, with a shell
        await box.run("cd /tmp && ls > listed")

What the walls are made of, from the outside in:

- a process of its own, ``nobody`` even where we are root, under bubblewrap: own user, network, process, mount, IPC, UTS
  and cgroup namespaces, no capability but the one that makes the next wall, a root file system of the interpreter
  and the system's libraries alone, read-only; no ``/proc``
- per program: own process, mount and IPC namespaces and an empty ``/tmp``; when the program ends, the kernel kills
  all it started and forgets all it wrote
- the program itself: no capability, no new privileges, resource limits, a filter of system calls
- its memory is watched from outside, its time is bounded inside and outside, its output is cut

A verdict never comes from an exit status or from what a program prints about itself: expected answers stay outside, and
the caller compares. ``Sandbox`` refuses to start where the walls do not hold: it tries them first.
"""

from areal_async.sandbox.box import Box, sandbox
from areal_async.sandbox.keeper import set_max_boxes
from areal_async.sandbox.limits import BoxLimits, BoxResult, End, ProgramResult, SandboxLimits
from areal_async.sandbox.programs import Sandbox, shared_sandbox
from areal_async.sandbox.tool import python

__all__ = [
    "Box",
    "BoxLimits",
    "BoxResult",
    "End",
    "ProgramResult",
    "SandboxLimits",
    "Sandbox",
    "python",
    "sandbox",
    "set_max_boxes",
    "shared_sandbox",
]
