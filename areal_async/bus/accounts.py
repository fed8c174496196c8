"""The broker's accounts: one for each role, so that an answer never leaves the role that asked for it.

The broker checks where a client writes, and not where it has an answer sent. Among users of one account, anyone who may
ask it anything at all (read a message, pull one, store one) can so have it write anywhere, in its own name. So the
operator's account holds the streams, and from another role's nothing leads there but what that role may publish.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from areal_async.bus.api import TRY_DEADLINE_S
from areal_async.bus.inbox import MOST_PULL_S, PULL_S
from areal_async.bus.permissions import Permissions, Role, permissions
from areal_async.bus.private import ensure_key, make_private_directory
from areal_async.protocol.subjects import Names

OTHERS = [role for role in Role if role is not Role.OPERATOR]
ANSWERS_END_S = {"$JS.API.DIRECT.GET.": 2 * TRY_DEADLINE_S, "$JS.API.CONSUMER.MSG.NEXT.": MOST_PULL_S + PULL_S}
"""Of requests with many answers, the time after the newest when the broker forgets who asked: what a longer pull is
sent goes to nobody. It holds some 1 kB for each."""


def key_path(folder: Path, role: Role) -> Path:
    """Return where the key of ``role`` lies among all roles' keys."""
    return folder / f"{role.value}.nk"


def accounts(names: Names, keys: Path) -> dict[str, Any]:
    """Return the part of a broker's configuration that lets the roles of a run in, making keys that are not there.

    What a role publishes reaches the operator's account as a request to a service, by which the broker knows to whom
    it is to answer. What a role hears comes as a stream; the broker passes on as such nothing that came in as a
    request, so roles hear each other without the operator's account in between.

    Args:
        keys: folder of the roles' keys, for their owner alone.

    Raises:
        UserError: others may read the keys.
    """
    make_private_directory(keys)
    granted = {role: permissions(role, names) for role in Role}
    owner = names.account(Role.OPERATOR)
    exports: dict[Role, list[dict[str, Any]]] = {role: [] for role in Role}
    imports: dict[Role, list[dict[str, Any]]] = {role: [] for role in Role}
    for role in OTHERS:
        for subject in granted[role].publish:
            exports[Role.OPERATOR].append(_service(subject))
            imports[role].append({"service": {"account": owner, "subject": subject}})
        for speaker, subject in _heard(role, granted, names):
            exports[speaker].append({"stream": subject})
            imports[role].append({"stream": {"account": names.account(speaker), "subject": subject}})
    made: dict[str, dict[str, Any]] = {
        names.account(role): {
            "users": [_user(ensure_key(key_path(keys, role)), granted[role])],
            "exports": _unique(exports[role]),
            "imports": imports[role],
        }
        for role in Role
    }
    made[owner]["jetstream"] = "enabled"
    return made


def covers(pattern: str, subject: str) -> bool:
    """Say whether all that matches ``subject``, which may have wildcards itself, matches ``pattern``."""
    wanted, given = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted, given = wanted[:-1], given[: len(wanted) - 1] if len(given) >= len(wanted) else [">"]
    return len(wanted) == len(given) and all(
        one == other or (one == "*" and other != ">") for one, other in zip(wanted, given, strict=True)
    )


def _user(key: str, may: Permissions) -> dict[str, Any]:
    return {"nkey": key, "permissions": {"publish": {"allow": may.publish}, "subscribe": {"allow": may.subscribe}}}


def _service(subject: str) -> dict[str, Any]:
    for prefix, answers_end_s in ANSWERS_END_S.items():
        if subject.startswith(prefix):
            return {"service": subject, "response_type": "stream", "response_threshold": f"{answers_end_s:g}s"}
    return {"service": subject}


def _heard(role: Role, granted: Mapping[Role, Permissions], names: Names) -> list[tuple[Role, str]]:
    """Return what a role hears of others: of the operator all that it may, of the rest what they publish of it.

    No two accounts can hear the same of each other. Of the outcomes, which both write, the controller hears the
    trainer's at once; the trainer finds the controller's, the abandoned ones at the end, when it looks by itself.
    """
    mine = [one for one in granted[role].subscribe if not one.startswith(role.inbox_prefix)]
    heard = [(Role.OPERATOR, one) for one in mine]
    for speaker in OTHERS:
        said = [one for one in granted[speaker].publish if any(covers(pattern, one) for pattern in mine)]
        if speaker is not role:
            heard += [(speaker, one) for one in said if (role, one) != (Role.TRAINER, names.outcomes)]
    return heard


def _unique(exports: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return list({json.dumps(one): one for one in exports}.values())
