"""What is asked of a held-out prompt, what came of it, and what an evaluation comes to."""

from typing import Any

from areal_async.protocol.fields import Count, OptionalVersionText, RewardNumber, TokenText, VersionText, check_places
from areal_async.protocol.types import Record, RowImages


class EvalTicket(Record, frozen=True, kw_only=True):
    """The right to answer one held-out prompt once."""

    eval_id: VersionText
    """The weights version the evaluation was asked for."""
    index: Count
    """Position among the held-out rows (those of all tasks, one task after another)."""
    workflow: TokenText
    row: dict[str, Any]
    attempt: Count = 0
    """Number of earlier tries to ask for it, of which the ticket or the result was lost."""
    sample: Count = 0
    """Which of the answers to that prompt."""
    images: RowImages = []
    """Stored before the ticket is, under ``Names.eval_group``."""

    def __post_init__(self) -> None:
        check_places(self.row, [one.place for one in self.images])

    @property
    def answer(self) -> str:
        """Name of what it asks for, once: of a first sample, as of an only one."""
        return f"{self.eval_id}.{self.index}" + (f".{self.sample}" if self.sample else "")


class EvalResult(Record, frozen=True, kw_only=True):
    """What became of an evaluation ticket."""

    eval_id: VersionText
    index: Count
    reward: RewardNumber = 0.0
    error: str = ""
    """Reason why there is no reward; empty where there is one."""
    oldest: OptionalVersionText = ""
    newest: OptionalVersionText = ""
    sample: Count = 0
    num_tokens: Count = 0
    """Tokens that the model has said for it, in all its turns."""


class EvalRecord(Record, frozen=True, kw_only=True):
    """One finished evaluation: an event, and a line of ``eval.jsonl``."""

    eval_id: VersionText
    step: Count
    workflow: str = ""
    """Name of the workflow whose rows they are."""
    accuracy: float | None
    """Mean reward over the rows that were scored (avg@k); None where none was."""
    num_scored: Count
    """Answers with a reward: one a row, or ``num_samples``."""
    num_failed: Count
    oldest: VersionText
    newest: VersionText
    """The versions it spanned."""
    low: float | None = None
    high: float | None = None
    """Ends of the accuracy's 95 % interval, where it has one."""
    num_samples: Count = 1  # answers to each row; one is greedy
    pass_at: dict[str, float] = {}  # by k, where there are several
    reasons: dict[str, Count] = {}
    """Why answers have no reward, and how often: the most frequent."""
    asked: str = ""  # hash of all that decides about its answers beside the weights; of the same another may take them
    is_graded: bool = False  # a reward is neither 0 nor 1: ``accuracy`` is a mean reward then, and is called so
