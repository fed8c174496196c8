"""Proof by scoring: a token that was lost, doubled or stamped wrongly has not the logprob its version's model gives."""

from pathlib import Path

import torch

from areal_async.protocol.types import Turn
from tests.unit.inference.embedded_engine import reference_logprobs

TOLERANCE = 1e-4


def assert_scored_by(model: Path, prompt: list[int], turn: Turn, start: int = 0, end: int | None = None) -> None:
    """Check the logprobs of the output tokens from ``start`` to ``end``."""
    expected = reference_logprobs(model, prompt, turn.output_ids)[start:end]
    torch.testing.assert_close(torch.tensor(turn.logprobs[start:end]), torch.tensor(expected), atol=TOLERANCE, rtol=0.0)


def assert_whole(turn: Turn, num_tokens: int) -> None:
    """Check that every token is there once, and belongs to one span."""
    assert (len(turn.output_ids), len(turn.logprobs), turn.finish_reason) == (num_tokens, num_tokens, "length")
    edges = [(span.start, span.end) for span in turn.spans]
    assert [0, *(end for _, end in edges)] == [*(start for start, _ in edges), num_tokens]
