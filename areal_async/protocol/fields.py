"""What the fields of a record may hold, as types that msgspec checks where a record is decoded.

Code that holds a record from the wire can parse its ids and trust its bounds.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta

MAX_GROUP_SIZE = 1 << 16
MAX_SERVERS = 1024
MAX_SERVER_RANKS = 256
"""GPUs that one server is spread over. A broadcast makes room for all of all servers before they are there."""
MAX_CREDITS = 256
"""Replies of one trajectory that are credited one by one; the headers of a message hold them all."""
OWN_INFO = "rollout/"
"""Begins the names of the numbers that every trajectory brings along by itself, beside those of its workflow."""
PROMPT_TOKENS, CACHED_TOKENS = "prompt_tokens", "cached_tokens"
"""Keys below ``OWN_INFO``: ``Turn.prompt_tokens`` and ``Turn.cached_tokens``, summed over a trajectory."""
MAX_INFO_KEYS = 64
"""Numbers that a workflow brings along in one trajectory (``policy.info``)."""
MAX_INFO = 1e30
"""Bound of each number of ``info``: their sum over a batch has to be finite too."""
MAX_REWARD = 1e6
"""Either way. What is made of it in float32, gradients and their squares among them, is finite up to there."""
MAX_LOGPROB = 1e4
"""Either way, of a sampled token in nats. Some servers say -9999 of what cannot be sampled."""
MAX_TEMPERATURE = 100.0
"""Temperature beyond which every token is about as likely as every other."""
MAX_TOP_K = (1 << 31) - 1
"""The servers hold it in 32 bits."""
MAX_EXACT = 1 << 53
"""Up to which a float holds every whole number."""
MAX_IMAGE_BYTES = 64 << 20
"""Of one image's file."""
MAX_IMAGE_SIDE = 1 << 16
"""Pixels, either way."""
MAX_IMAGES = 1024
"""Images that one sequence looks at, or one row has."""
INT64 = range(-(1 << 63), 1 << 63)
"""Range of the integers in files, tensors and generators of random numbers."""
MAX_STEP = 10**9 - 1
"""Largest step: a weights version has nine digits for it, and no run is given more steps."""

_VERSION = "[0-9]{1,9}-[0-9]{1,9}"
_GROUP_ID = "[0-9]{1,9}-[0-9]{1,15}-[0-9]{1,9}"
_ROLE = "[A-Za-z0-9_-]{0,64}"
_TAG = "[a-z][a-z0-9_-]{0,63}"
LAST, BEST = "last", "best"
"""What a version is called without a tag: the newest one, and the best."""

is_info_key = re.compile(r"[A-Za-z0-9._/-]{1,64}").fullmatch
is_role = re.compile(_ROLE).fullmatch
is_version = re.compile(_VERSION).fullmatch
is_group_id = re.compile(_GROUP_ID).fullmatch
_is_tag = re.compile(_TAG).fullmatch

VersionText = Annotated[str, Meta(pattern=rf"\A{_VERSION}\Z")]
"""Text that ``Version.parse`` reads."""
OptionalVersionText = Annotated[str, Meta(pattern=rf"\A({_VERSION})?\Z")]
"""A version, or empty for none."""
TagText = Annotated[str, Meta(pattern=rf"\A{_TAG}\Z")]
"""A name for a version; it begins with a letter, as no version and no step does."""
GroupIdText = Annotated[str, Meta(pattern=rf"\A{_GROUP_ID}\Z")]
"""Text that ``GroupId.parse`` reads."""
SampleUidText = Annotated[str, Meta(pattern=r"\A[!-~]{1,400}\Z")]
"""A slot's, which goes into a header: no blank, no line break, nothing beyond ASCII."""
TokenText = Annotated[str, Meta(pattern=r"\A[A-Za-z0-9_-]{1,200}\Z")]
"""One token of a subject."""
LineageText = Annotated[str, Meta(pattern=r"\A[0-9]{1,9}\Z")]
"""A lineage as the key of a JSON object."""
StepText = LineageText
"""A step as the key of a JSON object."""
RoleText = Annotated[str, Meta(pattern=rf"\A{_ROLE}\Z")]
"""Name of a policy that speaks in a workflow; empty for the only one."""
StretchText = Annotated[str, Meta(pattern=r"\A[0-9]{1,9}-[0-9]{1,9}\Z")]
"""A pool of rows and its stretch, as the key of a JSON object."""
Sha256Text = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
"""A SHA-256 in lower-case hexadecimal digits."""
Count = Annotated[int, Meta(ge=0, le=MAX_EXACT)]
NumAttempts = Annotated[int, Meta(ge=0, le=10**9 - 1)]
"""Number of attempts at one prompt: a group's id has nine digits for it."""
NumImageBytes = Annotated[int, Meta(ge=1, le=MAX_IMAGE_BYTES)]
NumPixels = Annotated[int, Meta(ge=1, le=MAX_IMAGE_SIDE)]
RewardNumber = Annotated[float, Meta(ge=-MAX_REWARD, le=MAX_REWARD)]
Place = Annotated[list[Annotated[str, Meta(max_length=1000)] | Count], Meta(min_length=1, max_length=32)]
"""Where a cell is within a row: names of columns and fields, and positions in lists."""
GroupSize = Annotated[int, Meta(ge=1, le=MAX_GROUP_SIZE)]
ServerIndex = Annotated[int, Meta(ge=0, lt=MAX_SERVERS)]
NumServerRanks = Annotated[int, Meta(ge=1, le=MAX_SERVER_RANKS)]
IncarnationText = Annotated[str, Meta(max_length=64)]
"""A process's id: a broadcast is announced with those of all servers in one message."""


def is_tag(text: str) -> bool:
    """Whether a version can be called so by a tag."""
    return text not in (LAST, BEST) and _is_tag(text) is not None


def check_places(row: Mapping[str, Any], places: Sequence[Place]) -> None:
    """Make sure that a row has None in each place, and each place stands here once.

    Raises:
        ValueError: it has not, or one does not.
    """
    if len(set(map(tuple, places))) != len(places):
        raise ValueError("places in a row: got one twice")
    for place in places:
        cell: Any = row
        for step in place:
            known = cell if isinstance(cell, Mapping) else range(len(cell)) if isinstance(cell, list) else ()
            if step not in known:
                raise ValueError(f"places in a row: got {place!r:.100}, which the row does not have")
            cell = cell[step]
        if cell is not None:
            raise ValueError(f"places in a row: got {place!r:.100}, where the row has a value")
