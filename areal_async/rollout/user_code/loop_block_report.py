"""What holds up a node's event loop, as a file: for anyone who watches the run, and for the node that comes after.

    blocked/node-0.json    what stands on the loop of node 0 now, or stood there when that ended itself

A node with a blocked loop can tell nobody over the bus. It is written by the thread that watches the loop, told to the
user by the launcher, and read by the next node of that name, which stores the slot as failed (``recovery``).
"""

from pathlib import Path

import msgspec

from areal_async.errors import WireError
from areal_async.process.atomic_folders import write_whole
from areal_async.protocol.arms import ArmTicket
from areal_async.protocol.evaluations import EvalTicket
from areal_async.protocol.types import Ticket
from areal_async.protocol.wire import decode_json

FOLDER = "blocked"
SUFFIX = ".json"
ENDED_BY_WATCH = 70
"""Exit status of a process whose loop stood still for too long, nobody knows whose fault it was."""
ENDED_FOR_CULPRIT = 71
"""The same, where the file says whose."""
HELD_UP = "held up the event loop"
"""Words in the reason of every slot that did so."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """What a task is for: one slot of a group, one row of an evaluation, or one side of an arm's prompt."""

    workflow: str
    name: str
    """The name that the graph of waits has for it."""
    ticket: Ticket | None = None
    sibling: int = 0
    is_whole_group: bool = False
    """One call for all siblings: they fail together."""
    sample_uid: str = ""
    eval_ticket: EvalTicket | None = None
    arm_ticket: ArmTicket | None = None


class LoopBlock(msgspec.Struct, frozen=True, kw_only=True):
    """One event loop that stands still."""

    node_id: str
    blocked_s: float
    place: str
    """``file:line function``, the innermost of the user's code."""
    work: Work | None = None
    """The work in whose name that runs; None where it is not known."""

    @property
    def sentence(self) -> str:
        """Say it while it lasts."""
        who = f"workflow {self.work.workflow}, {self.work.name}, holds" if self.work else "something holds"
        return f"{who} up the event loop of node {self.node_id}, at {self.place}"

    @property
    def reason(self) -> str:
        """Say it in the slot."""
        workflow = self.work.workflow if self.work else ""
        return (
            f"workflow {workflow}: {HELD_UP} of node {self.node_id} for {self.blocked_s:.0f} s, at {self.place}; "
            "await, or call what computes or waits in a thread (asyncio.to_thread)"
        )


class LoopBlockFile:
    """The file of one node."""

    def __init__(self, run_directory: Path, node_id: str) -> None:
        self.node_id = node_id
        self._path = run_directory / FOLDER / f"node-{node_id}{SUFFIX}"

    def write(self, block: LoopBlock) -> None:
        """Put it in place of what was there, whole, also after a power cut. Any thread may."""
        write_whole(self._path, msgspec.json.encode(block))

    def read(self) -> LoopBlock | None:
        """Return what is there; None where nothing is, or nothing that can be read."""
        return _read(self._path)

    def remove(self) -> None:
        """It is over, or has been seen to."""
        self._path.unlink(missing_ok=True)


def read_all(run_directory: Path) -> list[LoopBlock]:
    """Return what holds up the nodes of this host's run directory."""
    found = [_read(path) for path in sorted((run_directory / FOLDER).glob(f"*{SUFFIX}"))]
    return [one for one in found if one is not None]


def _read(path: Path) -> LoopBlock | None:
    try:
        return decode_json(path.read_bytes(), LoopBlock, what=path.name)
    except (OSError, WireError):
        return None
