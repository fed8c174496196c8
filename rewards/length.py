"""Score how long an answer is, in tokens: what was sampled, not what is shown."""


def overlong_penalty(num_tokens: int, *, limit: int, slack: int) -> float:
    """Return 0.0 up to `limit - slack` tokens, then evenly down to -1.0 at `limit` and beyond.

    Raises:
        ValueError: not 0 < slack <= limit.

    Source: Yu et al. 2025 (DAPO), equation 13, "soft overlong punishment".
    """
    if not 0 < slack <= limit:
        raise ValueError(f"slack: got {slack} with limit={limit}, need more than 0 and no more than the limit")
    return -min(1.0, max(0.0, (num_tokens - (limit - slack)) / slack))
