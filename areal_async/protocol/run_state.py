"""What operators want of a run, how its processes fare, and what it is: values of keys in the run's bucket."""

from typing import Self

import msgspec

from areal_async.protocol.fields import (
    Count,
    IncarnationText,
    NumServerRanks,
    OptionalVersionText,
    ServerIndex,
    TokenText,
    VersionText,
)
from areal_async.protocol.types import Record


class Control(Record, frozen=True, kw_only=True):
    """KV ``control``: what operators want of the run as a whole. The controller writes it, on their order."""

    is_paused: bool = False
    """Nothing is admitted. What was admitted before is finished."""
    is_stopping: bool = False
    """The launcher ends the run as at SIGTERM; it takes this back when the run is started again."""
    by: str = ""
    """Name of the person or process that gave the last order."""
    reason: str = ""
    at: str = ""
    """Time, in UTC as ISO 8601."""


class CrewState(Record, frozen=True, kw_only=True):
    """KV ``crew.<name>``: how the launcher sees processes that live and die together."""

    name: str
    state: str
    """``running``, ``died`` (it will be started again), ``waiting`` (for a host), ``stopped`` or ``finished``."""
    reason: str = ""
    """Why it died the last time, or waits."""
    hosts: list[str] = []
    """Of each of its processes, in their order; a run's own host among them by the name that its launcher gives it."""
    num_starts: Count = 0
    at: str = ""
    """Time of the last change, in UTC as ISO 8601."""


class Holder(Record, frozen=True, kw_only=True):
    """KV ``launcher`` and ``node.<id>``: the process that keeps the run, or a joined node; it writes this again and
    again, and a key that is not written any more is kept by nobody."""

    holder_id: str
    """Id, different for every holder."""
    host: str
    pid: Count
    since: str
    """Time of taking hold, in UTC as ISO 8601."""
    has_left: bool = False
    """Whether it left in good order, so that no failure has to be detected."""

    @property
    def place(self) -> str:
        """Where it is, for people."""
        return f"process {self.pid} of host {self.host}"


class Change(Record, frozen=True, kw_only=True):
    """A setting that was changed while the run went on."""

    value: float
    given: float | None
    """Value in the settings at that time, None included. The change holds while they still have it."""
    by: str = ""
    reason: str = ""
    at: str = ""
    """Time, in UTC as ISO 8601."""


class Changes(Record, frozen=True, kw_only=True):
    """KV ``changes``: the settings that operators have changed. The controller writes it, on their order."""

    by_setting: dict[str, Change] = {}
    """Dotted name -> its newest change."""


class Rollback(Record, frozen=True, kw_only=True):
    """KV ``rollback``: the newest order to go on from an earlier checkpoint. The controller writes it on an operator's
    order, the trainer on an alarm's; a trainer carries it out as it takes its lineage, and writes that it has."""

    number: Count = 0
    """Orders so far, this one included."""
    version: OptionalVersionText = ""
    """The checkpoint to go on from; empty where there was no order yet."""
    by: str = ""
    reason: str = ""
    at: str = ""
    """Time, in UTC as ISO 8601."""
    num_by_alarm: Count = 0
    """Orders so far that an alarm gave."""
    lineage: Count = 0
    """The one that has carried it out, or refused it; 0 while nobody has."""
    refusal: str = ""
    """Why it could not be carried out."""

    @property
    def is_due(self) -> bool:
        """Whether a lineage that begins is to carry it out."""
        return bool(self.version) and not self.lineage


class SharedSettings(Record, frozen=True, kw_only=True):
    """KV ``settings``: what the run does, for who joins it from elsewhere. The launcher writes it at each start."""

    settings: str
    """All of them, resolved, as JSON."""
    library: str
    """Version of the library that wrote it."""
    files: dict[str, str] = {}
    """path -> SHA-256 of the workflows' files, and of what they import from the repository."""


class RunState(Record, frozen=True, kw_only=True):
    """KV ``run``: how far the run as a whole is."""

    state: str = "running"
    """``running``, ``stopped`` (its launcher has ended, and another start goes on), ``finished`` or ``failed``."""
    reason: str = ""


LEFT = "left"
"""Why a server is fenced that is not wanted any more: nobody misses it."""
DISOWNED = "its node is gone"
"""Why a server is fenced whose node has not been heard for too long: the controller writes it, in the node's stead."""


class ServerState(Record, frozen=True, kw_only=True):
    """KV ``server.<id>``: what one inference server runs."""

    server_id: TokenText
    node_id: str
    url: str
    version: OptionalVersionText
    """Weights version that it holds; empty until that is an announced one."""
    incarnation: IncarnationText = ""
    """Different after every start of its process, and every broadcast that it has left: who has a place in one."""
    num_ranks: NumServerRanks = 1
    """GPUs it is spread over: its ranks in an update group."""
    fenced: bool = False
    reason: str = ""
    failure: str = ""
    """Why it was fenced the last time, other than to be started."""
    unreadable: str = ""
    """Why the files of the weights that it should hold cannot be loaded; empty once some were."""
    missed: str = ""
    """Group of the broadcast that it could not join, and why; empty once it holds what was announced."""
    wants_weights: bool = False
    """It holds no version and could take one now, and there is none that it can load."""
    card: str = ""
    """``used`` while it may take memory of a GPU that it has in turns with the trainer; the version of the trainer's
    hold while it takes none until that is over; empty where it shares none."""

    @property
    def is_waited_for(self) -> bool:
        """Whether others may wait for it: for what it holds, in a broadcast, or for the GPU that it has in turns."""
        return not self.fenced or self.wants_weights or bool(self.card)

    def gone(self, reason: str) -> Self:
        """Return what is said of it once it is no more: nobody waits for it."""
        return msgspec.structs.replace(self, version="", fenced=True, reason=reason, wants_weights=False, card="")


class CardHold(Record, frozen=True, kw_only=True):
    """KV ``card``: whether the trainer has the GPUs to itself that it shares with servers in turns.

    It writes this again and again while it has them, so that a hold which is not written any more is over.
    """

    version: VersionText
    """Of the step that it has them for."""
    is_held: bool
    beat: Count = 0
    """Number of times that this hold was written before."""


class FleetMembers(Record, frozen=True, kw_only=True):
    """KV ``fleet.<node>``: which servers operators want a node to have from now on; without it, those of its settings.

    The controller writes it, on their order.
    """

    indices: list[ServerIndex]
    """What follows the node in their ids."""


class OrderedHosts(Record, frozen=True, kw_only=True):
    """KV ``hosts``: how the hosts that operators want differ from those that the launcher was started with.

    The controller writes it, on their order.
    """

    added: list[str] = []
    """In the order in which they came, which their nodes' ids go by: none is ever taken from here."""
    removed: list[str] = []
    """Those of all of them that are to have no process any more."""


class Snapshot(Record, frozen=True, kw_only=True):
    """KV ``journal`` and ``accounts``: what the log comes to up to an entry, so that a start reads only what follows.

    Anyone who finds it wrong or of another log reads the whole log instead.
    """

    sequence: Count
    """Stream sequence of that entry."""
    entry_sha256: str
    """SHA-256 of that entry as it is stored: a log that was put back or moved has another one there."""
    state: bytes
    """What was read up to there; base64 in JSON."""
    state_sha256: str
