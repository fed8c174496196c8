"""Which arm answers a request: by its share, and the same one for all of a session. Pure.

The arms lie side by side between 0 and 1, in the order in which they were given, and a session has its place there for
good: where a share grows, only those sessions change their arm that it grows over.
"""

import math
import re
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

from areal_async.errors import UserError

MAX_ARMS = 16
SUM_SLACK = 1e-6
"""By which shares may add up to something else than 1."""
_is_arm = re.compile(r"[A-Za-z0-9_-]{1,64}").fullmatch


class Share(NamedTuple):
    """How much of the traffic an arm answers."""

    arm: str
    """What a person types for its version, by which it is called too."""
    share: float


def read_split(text: str) -> list[Share]:
    """Read ``champion=0.9,candidate=0.1``.

    Raises:
        UserError: no shares of different arms that add up to 1.
    """
    example = "need arms and shares that add up to 1, like champion=0.9,candidate=0.1"
    shares = []
    for word in text.split(","):
        arm, _, number = word.strip().partition("=")
        try:
            share = float(number)
        except ValueError:
            share = math.nan
        if not _is_arm(arm) or not 0 < share <= 1:
            raise UserError(f"--split: got {word.strip()[:80]!r}, {example}")
        shares.append(Share(arm, share))
    if len({share.arm for share in shares}) < len(shares) or len(shares) > MAX_ARMS:
        raise UserError(f"--split: got {text[:200]!r}, {example}, each arm once and {MAX_ARMS} at most")
    if abs(sum(share.share for share in shares) - 1) > SUM_SLACK:
        raise UserError(f"--split: got {text[:200]!r}, whose sum is {sum(one.share for one in shares):g}, {example}")
    return shares


def session_id(key: str, session: str) -> str:
    """Return what a session is known by: it does not tell what its client calls it.

    Args:
        key: name of the client's key; two clients may call their users alike.
    """
    return blake2b(f"{key}\0{session}".encode(errors="surrogatepass"), digest_size=8).hexdigest()


def choose(shares: Sequence[Share], session: str) -> str:
    """Return the arm of a session, by its ``session_id``."""
    place = int(session, 16) / 2 ** (4 * len(session)) * sum(one.share for one in shares)
    for arm, share in shares:
        place -= share
        if place < 0:
            return arm
    return shares[-1].arm
