"""An attempt as one JSON object: what ``try --json`` writes. Pure."""

from dataclasses import asdict
from typing import Any

import msgspec

from areal_async.monitor.token_views import token_lists
from areal_async.rollout.policy.text import TextCodec
from areal_async.rollout.trial import Attempt, TimedTurn


def attempt_json(attempt: Attempt, codec: TextCodec) -> str:
    """Return one line. Token lists of a sequence have one entry per token, None for a version that nobody sampled."""
    slot = attempt.trajectory.slot
    described = {
        "index": attempt.prompt.index,
        "sibling": slot.sibling,
        "status": slot.status,
        "reward": slot.reward if slot.status == "scored" else None,
        "reason": slot.reason,
        "places": [location._asdict() for location in attempt.locations],
        "row": attempt.prompt.row,
        "turns": [_turn(timed, codec) for timed in attempt.turns],
        "sequences": [token_lists(sequence) for sequence in attempt.sequences],
        "info": attempt.trajectory.info,
        "times": asdict(attempt.times),
    }
    return msgspec.json.encode(described, enc_hook=str).decode()


def _turn(timed: TimedTurn, codec: TextCodec) -> dict[str, Any]:
    return {
        **msgspec.structs.asdict(timed.turn),
        "text": codec.decode(timed.turn.output_ids),
        "duration_s": timed.duration_s,
        "first_token_s": timed.first_token_s,
    }
