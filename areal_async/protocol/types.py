"""The stations on the road from a row to a gradient, and the records that account for them.

Every one is an immutable struct that can cross a process boundary (``wire``). One word for one thing: these names are
used in code, logs, metrics and documents alike. What a field may hold stands in its type (``fields``).
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from areal_async.protocol.fields import (
    MAX_CREDITS,
    MAX_IMAGES,
    Count,
    GroupIdText,
    GroupSize,
    LineageText,
    NumImageBytes,
    NumPixels,
    OptionalVersionText,
    Place,
    RoleText,
    SampleUidText,
    Sha256Text,
    StretchText,
    TokenText,
    VersionText,
    check_places,
)
from areal_async.protocol.ids import GroupId as GroupId
from areal_async.protocol.ids import Version as Version

NOT_SAMPLED = -1
"""The version of a token that no model of ours produced (prompt, tool output)."""
NOT_CREDITED = -1
"""The reply of a token that belongs to no credited one."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What every message of ours starts from. Fields added later take defaults; readers skip unknown ones."""


class ColumnError(KeyError):
    """A row does not have a column: a mapping's error that names those it has."""

    def __str__(self) -> str:
        return str(self.args[0])  # a KeyError's own would be in quotes


class Prompt(Record, frozen=True, kw_only=True):
    """One dataset row with a stable id. ``prompt["question"]`` reads a column."""

    epoch: int
    """Epoch of its task, where tasks have epochs of their own."""
    index: int
    """Position in the data set (tasks concatenated in the order of the settings), from 0."""
    row: dict[str, Any]

    def __getitem__(self, column: str) -> Any:
        """Return what the row has in a column.

        Raises:
            ColumnError: it has no such column.
            ImageError: the image there could not be taken in; the row has the error in its place.
        """
        if column not in self.row:
            columns = ", ".join(self.row) or "none"
            raise ColumnError(f"row {self.index} has no column {column!r}, its columns are {columns}")
        if isinstance(cell := self.row[column], Exception):
            raise cell
        return cell


class ImageRef(Record, frozen=True, kw_only=True):
    """An image that a group's model is shown, by its content: the bytes are in the stream of images."""

    sha256: Sha256Text
    """Of the file's bytes; with the group's id it names the image."""
    num_bytes: NumImageBytes
    """Size of the file, a PNG."""
    width: NumPixels
    height: NumPixels


class RowImage(Record, frozen=True, kw_only=True):
    """An image in a row of a ticket, where the row itself has None."""

    place: Place
    """Of the cell: its column, and the names of fields and positions in lists below that."""
    image: ImageRef | None = None
    reason: str = ""
    """Why it could not be taken in: who reads the cell is told. Empty where there is an image."""

    def __post_init__(self) -> None:
        if (self.image is None) is not bool(self.reason):
            raise ValueError(f"row image: got {'neither' if self.image is None else 'both'} of image and reason")


RowImages = Annotated[list[RowImage], msgspec.Meta(max_length=MAX_IMAGES)]


class Ticket(Record, frozen=True, kw_only=True):
    """The right to try one prompt once, now."""

    group_id: GroupIdText
    workflow: TokenText
    """Name of the workflow, a subject token."""
    row: dict[str, Any]
    group_size: GroupSize
    version: VersionText
    """Newest weights version at admission; stands for the group's oldest until a slot is stored."""
    num_failed_attempts: Count = 0
    """Earlier attempts at this prompt that ended ``failed``."""
    number: Count = 0
    """Position among all admissions of the run, from 1."""
    images: RowImages = []
    """Stored before the ticket is."""

    def __post_init__(self) -> None:
        check_places(self.row, [one.place for one in self.images])

    @property
    def prompt(self) -> Prompt:
        """The row under its stable id, without its images."""
        group = GroupId.parse(self.group_id)
        return Prompt(epoch=group.epoch, index=group.index, row=self.row)


class VersionSpan(Record, frozen=True, kw_only=True):
    """Output tokens ``[start, end)`` were produced by ``version``, as the server stamped them."""

    version: str
    start: int
    end: int


class Turn(Record, frozen=True, kw_only=True):
    """One call of the model inside a workflow."""

    prompt_ids: list[int]
    output_ids: list[int]
    logprobs: list[float]
    """Natural log, one per output token, from the distribution that was sampled from."""
    spans: list[VersionSpan]
    """Cover ``output_ids`` without a gap."""
    oldest: str
    """The oldest of the version at submission and every span's."""
    finish_reason: str
    """``stop``, ``length`` or ``abort``."""
    role: str = ""
    """Name of the policy that spoke, where the workflow has several; empty for ``policy`` itself."""
    temperature: float | None = None
    """Temperature that the server was asked for, 0 for greedy; None for the run's, where nothing was said."""
    is_steered: bool = False
    """A grammar, a bias or a penalty had a say: ``logprobs`` are not of the model's own distribution."""
    top_logprobs: list[list[tuple[int, float]]] | None = None
    """The likeliest tokens at each position, as ``Reply.top_logprobs``; for the workflow alone, never stored."""
    images: list[ImageRef] = []
    """Those in the prompt, in the order of their tokens."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Tokens that servers had in their caches, as they say, of the ``prompt_tokens`` of its streams."""


class Sequence(Record, frozen=True, kw_only=True, eq=False):
    """One row to train on: turns merged while each prompt extends the tokens before it. All arrays [L]."""

    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    """True exactly on tokens the policy sampled."""
    logprobs: NDArray[np.float32]
    """The server's; 0 where ``loss_mask`` is False."""
    versions: NDArray[np.int64]
    """``Version.pack()``; ``NOT_SAMPLED`` where ``loss_mask`` is False."""
    turns: NDArray[np.int16] | None = None
    """Which of the slot's credits each token belongs to, from 0, or ``NOT_CREDITED``; None where the slot has none."""
    temperatures: NDArray[np.float32] | None = None
    """``Turn.temperature`` of each sampled token, anything elsewhere. None where it is the run's."""
    steered: NDArray[np.bool_] | None = None
    """True on sampled tokens of turns that were (``Turn.is_steered``). None where there are none."""
    images: list[ImageRef] | None = None
    """Those whose tokens are in ``token_ids``, in their order, one that is shown twice twice; None without any."""

    @property
    def num_tokens(self) -> int:
        """L."""
        return len(self.token_ids)


class SlotStatus(StrEnum):
    """How one sibling ended."""

    SCORED = "scored"
    FAILED = "failed"
    REJECTED = "rejected"


class ReplyReward(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one reply of a trajectory is worth, where its workflow says so reply by reply.

    An array on the wire: the headers of a batch have many.
    """

    reward: float
    """The reply's return: what it led to, later rewards included, as the workflow reckons it."""
    num_tokens: Count
    """Sampled ones of the reply."""
    role: RoleText = ""
    """``Turn.role``: a reply is compared with those of its own role."""


class Slot(Record, frozen=True, kw_only=True, gc=False):  # there are very many, and none leads back to itself
    """The header of one trajectory: all that the cut needs, without its tokens."""

    sibling: Count
    sample_uid: SampleUidText
    """Names the producer too, so that two producers of one slot can be told apart."""
    status: SlotStatus
    reward: float = 0.0
    """0 unless scored; the mean of its credits where it has any."""
    reason: str = ""
    """Why it failed or was rejected."""
    num_tokens: Count = 0
    """Number of tokens over all sequences, prompt included."""
    num_output_tokens: Count = 0
    """Number of sampled tokens."""
    oldest: VersionText
    """Oldest version of any sampled token, or at submission; of the ticket when nothing was sampled."""
    newest: VersionText
    crc32: Count = 0
    """CRC-32 of the slot's payload bytes."""
    index: Count = 0
    """Position of the payload inside its message."""
    num_truncated: Count = 0
    """Turns that ended by length."""
    credits: Annotated[list[ReplyReward], msgspec.Meta(max_length=MAX_CREDITS)] = []
    """Rewards of its replies, in the order they were given; empty where one reward is for all of it."""


class Trajectory(Record, frozen=True, kw_only=True):
    """What fills one slot of a group."""

    slot: Slot
    sequences: list[Sequence]
    """Token sequences of the episode; empty unless it was scored."""
    info: dict[str, float] = {}
    """The workflow's own metrics, and those that each trajectory has (``fields.OWN_INFO``)."""

    @property
    def images(self) -> dict[str, ImageRef]:
        """What its tokens show, each once, by hash, in their order."""
        return {image.sha256: image for sequence in self.sequences for image in sequence.images or ()}


class StoredMessage(Record, frozen=True, kw_only=True, gc=False):
    """A trajectory message in the stream, as its headers tell it."""

    group_id: str
    workflow: str
    ticket_version: str
    """Weights version in the ticket (``Ticket.version``)."""
    num_failed_attempts: int
    group_size: int
    slots: list[Slot]
    sequence: int
    """Stream sequence: a hint where to find the payload, never a key."""
    num_bytes: int
    stored_ns: int = 0
    """When it was stored, in nanoseconds since 1970 by the broker's clock; 0 where that is not known."""


class OutcomeKind(StrEnum):
    """What became of a group."""

    TRAINED = "trained"
    STALE = "stale"
    FAILED = "failed"
    FILTERED = "filtered"
    REJECTED = "rejected"
    ABANDONED = "abandoned"
    DEAD = "dead"
    LATE = "late"
    """One slot came after its group was settled. Settles nothing."""
    DUPLICATE = "duplicate"
    """One slot was dropped for another producer's. Settles nothing."""
    ROLLED_BACK = "rolled_back"
    """It was recorded trained, and the weights that it was trained in were given up. Ends a ``TRAINED`` group too."""
    READMITTED = "readmitted"
    """A dead group is tried again by the operator: its prompt gets ``max_attempts`` attempts. Settles nothing."""

    @property
    def settles(self) -> bool:
        """Whether it ends the group and returns its credit."""
        return self not in (OutcomeKind.LATE, OutcomeKind.DUPLICATE, OutcomeKind.READMITTED)

    @property
    def readmits(self) -> bool:
        """Whether the prompt is tried again, without anybody asking."""
        return self in (OutcomeKind.FAILED, OutcomeKind.ABANDONED, OutcomeKind.ROLLED_BACK)


class Outcome(Record, frozen=True, kw_only=True):
    """One line of the audit trail."""

    group_id: GroupIdText
    kind: OutcomeKind
    lineage: Count
    """Lineage of the trainer (or the controller's view of it) that recorded this; 0 before the first."""
    step: Count = 0
    """The training step, for ``trained`` and for what was found while cutting one."""
    reason: str = ""
    num_failed_attempts: Count = 0
    """Number of failed attempts at this prompt, this one included when it failed."""
    mean_reward: float | None = None
    """Mean over the scored slots of a group that was whole and yet trained nothing (``filtered``, ``stale``)."""
    num_whole_before: Count = 0
    """Groups found whole since the outcome that failed before this one: whether failures follow one another."""
    sample_uid: str = ""
    """Producer's id of the slot, for ``late`` and ``duplicate``."""
    workflow: str = ""
    """The group's, where the recorder knew it."""


class CutSlot(Record, frozen=True, kw_only=True, gc=False):
    """A slot in a cut, and where its payload was seen."""

    slot: Slot
    sequence: Count


class CutGroup(Record, frozen=True, kw_only=True):
    """A group in a cut, with the siblings that are used."""

    group_id: GroupIdText
    workflow: TokenText
    slots: list[CutSlot]
    num_failed_attempts: Count = 0
    """Earlier attempts at its prompt that failed: needed if it falls out of the cut."""
    duration_s: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    """Time from its ticket to its last slot, by the broker's clock; 0 where that is not known."""


class CutKind(StrEnum):
    """What a journal entry says."""

    BEGIN = "begin"
    """A trainer took ``lineage``, restored from the checkpoint of ``step``; older lineages' entries end here."""
    CUT = "cut"
    """The batch of ``step``."""
    BRANCH = "branch"
    """Cuts after ``step`` cannot be replayed: they are given up, their groups tried again."""
    CHECKPOINT = "checkpoint"
    """The trainer's ranks checkpoint ``step`` before they train another: the stream needs the room."""
    END = "end"
    """No batch: the trainer's ranks finish before ``step``."""


class Cut(Record, frozen=True, kw_only=True):
    """An entry of the journal: the batch of one training step, written before the step runs."""

    kind: CutKind = CutKind.CUT
    lineage: Count
    step: Count
    groups: list[CutGroup] = []
    seed: int = 0
    max_staleness: Count = 0
    """The bound it was cut under, and is held to wherever it is trained."""
    lr: float = 0.0
    """The peak of the learning rate that it is trained with, wherever; 0 for what the settings say."""
    numbers: dict[str, float | None] = {}
    """Other settings that it is trained with, wherever, by name; what is not here is as the settings say."""
    masks_stale: bool = False
    """Tokens over the bound are left out of the loss, instead of being impossible."""
    branches: dict[LineageText, Count] = {}
    """lineage -> last step it shares with the lineage before it, where they parted (``staleness.age_at``)."""


class LineageRecord(Record, frozen=True, kw_only=True):
    """KV ``lineage``: who may train."""

    lineage: Count


class TensorSpec(Record, frozen=True, kw_only=True):
    """One tensor in a bucket of a broadcast."""

    name: str
    dtype: str
    """Name of the type in torch, without the module: ``bfloat16``."""
    shape: list[int]


class UpdateGroup(Record, frozen=True, kw_only=True):
    """The process group over which a trainer broadcasts weights to servers. The trainer is its rank 0."""

    name: str
    """New with every change of membership."""
    address: str
    port: int
    """Port of the trainer's store."""
    backend: str
    """Library of the broadcast: ``gloo`` or ``nccl``."""
    size: int
    """Ranks, the trainer's included."""
    ranks: dict[str, int]
    """server id -> the first of its ranks; a server of n GPUs takes n."""
    incarnations: dict[str, str] = {}
    """server id -> the incarnation that was asked: no other process of that server has a place."""


DISK, ADAPTER, DISTRIBUTED = "disk", "adapter", "distributed"
"""Kinds of a weights version."""


class WeightsVersion(Record, frozen=True, kw_only=True):
    """KV ``weights.<policy>``: where the newest weights are; written again when they are somewhere else too."""

    version: VersionText
    path: str = ""
    """A Hugging Face folder, or PEFT's of an adapter; empty while it is not on disk."""
    on_disk: OptionalVersionText = ""
    """The newest version that is on disk, this one or an older one; empty where that is not said."""
    sha256: dict[str, str] = {}
    """file name -> hash, for the safetensors files, and an adapter's description."""
    tensors_sha256: dict[str, str] = {}
    """tensor name -> hash of its bytes, for a few tensors that servers keep as they are: proves what a server runs."""
    kind: str = DISK
    """``DISTRIBUTED`` while it is broadcast; ``ADAPTER`` where servers merge it into their base; else ``DISK``."""
    group: UpdateGroup | None = None
    """Process group whose members receive the version now, in ``buckets``."""
    buckets: list[list[TensorSpec]] = []
    """Tensors of each broadcast, in order, flattened into one tensor of bytes."""
    final: bool = False
    """The run's last version."""
    taken_by: Count = 0
    """Lineage that has taken it over, as it began: nobody receives it from the older one any more. 0 for none."""


class CheckpointRecord(Record, frozen=True, kw_only=True):
    """KV ``checkpoint``: the newest complete one."""

    version: VersionText
    path: str
    """Its folder; empty while there is none."""
    sums_sha256: str = ""
    """SHA-256 of its ``SHA256SUMS``; empty where it has none."""


class Mix(Record, frozen=True, kw_only=True):
    """How often each task has its turn, from a position on. All by task, in the order of the settings."""

    start: Count
    """The first position that it decides about."""
    weights: list[Count]
    """Whole numbers in proportion to their shares; 0 for none."""
    counts: list[Count]
    """Visits that they had had before."""


class Admitted(Record, frozen=True, kw_only=True):
    """KV ``admitted``: the data cursor. Only ever grows."""

    total: Count = 0
    """Groups admitted, re-admissions included."""
    num_fresh: Count = 0
    """The position in the sampler's endless sequence: prompts admitted for the first time, or passed over."""
    num_readmitted: Count = 0
    """Number of re-admissible outcomes, in their stored order, that were admitted again."""
    num_skipped: Count = 0
    """Prompts that the curriculum has passed over."""
    known: dict[StretchText, Count] = {}
    """Number of visits that were known when a stretch began, for each that the curriculum decides about."""
    mixes: list[Mix] = []
    """The mix of the tasks now, and those to come, by their starts; none where rows have one order in common."""


class DeadLetter(Record, frozen=True, kw_only=True):
    """A stored message that its reader could not use."""

    stream: str
    subject: str
    sequence: Count
    reason: str
    reader: str
    """Role of the process that refused it."""
    headers: dict[str, str] = {}
    data: bytes = b""
    """Its first bytes; base64 in JSON."""


def mean(values: list[float]) -> float:
    """Return the arithmetic mean, 0 for no values."""
    return sum(values) / len(values) if values else 0.0


Metrics = Mapping[str, float | int | str]
