"""Arms: versions that answer additional prompts beside a live run, each prompt beside the newest weights.

One ticket is for one prompt of one arm; its node answers it twice, with the arm's servers and with those of the policy
under training, and stores one result. So a pair is whole or not there.

The sides of a comparison are served as arms are, for as long as ``compare`` asks for it; each answers held-out rows
alone, and one ticket is for one answer.
"""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from areal_async.protocol.evaluations import EvalResult, EvalTicket
from areal_async.protocol.fields import MAX_REWARD, Count, OptionalVersionText, TokenText
from areal_async.protocol.types import Record

PARTS = 10**6
"""A share is a whole number of so many parts, so that how many prompts are due is exact."""
MAX_ARMS = 8
MAX_OPEN = 64
"""Prompts of one arm that are asked and not counted, at the most."""
LEVELS = 100
"""A difference is kept as a whole number of so many parts of the largest, either way."""

MAX_PATH_CHARACTERS = 4096
MAX_SAMPLES = 1024
MAX_TEXT_CHARACTERS = 20_000
"""Of an answer to a row of a comparison: the rest is not kept."""

ARM_NAME = "[A-Za-z_][A-Za-z0-9_]{0,47}"
ArmName = Annotated[str, Meta(pattern=rf"\A{ARM_NAME}\Z")]
"""Part of a server's id, as the name of a frozen policy is."""
Share = Annotated[float, Meta(ge=1 / PARTS, le=1.0)]
Alpha = Annotated[float, Meta(gt=0.0, lt=1.0)]
Reach = Annotated[float, Meta(gt=0.0, le=2 * MAX_REWARD)]


class Pinned(Record, frozen=True, kw_only=True):
    """A version that nodes are to serve beside the newest weights."""

    name: ArmName
    arm_id: TokenText
    """Another for each that ever had this name."""
    version: OptionalVersionText = ""
    """Weights version of the run; empty for a model from elsewhere."""
    path: Annotated[str, Meta(min_length=1, max_length=MAX_PATH_CHARACTERS)]
    """Folder of its model, or a hub name, as nodes find it."""


class Arm(Pinned, frozen=True, kw_only=True):
    """A version that answers additional prompts."""

    share: Share = 0.1
    """Its prompts for each one that is admitted."""
    alpha: Alpha = 0.05
    """Chance that it is ever told apart from weights that are as good."""
    reach: Reach = 1.0
    """Largest size of a difference of two rewards."""
    first_admission: Count
    """Prompts that were admitted before it came, readmissions included: its share is of those after them."""
    first_position: Count
    """Likewise of prompts in the order of the data, which its own prompts follow."""
    by: str = ""
    reason: str = ""
    at: str = ""
    """Time, in UTC as ISO 8601."""

    def num_due(self, num_admitted: int) -> int:
        """Return how many prompts it is to have been asked, of ``num_admitted`` that the run has in all."""
        return max(0, num_admitted - self.first_admission) * self._parts // PARTS

    def position(self, number: int) -> int:
        """Return the place, in the order of the data, of its prompt ``number``, from 1.

        It is that of the admission with which that prompt fell due, where no prompt was tried again in between.
        """
        return self.first_position + -(-number * PARTS // self._parts) - 1

    @property
    def _parts(self) -> int:
        return max(1, round(self.share * PARTS))


class Arms(Record, frozen=True, kw_only=True):
    """KV ``arms``: those that nodes are to serve. The controller writes it, on an order or from the settings."""

    by_name: dict[ArmName, Arm] = {}
    ordered: list[ArmName] = []
    """Those about which an operator has decided: the settings do no more."""
    compared: dict[ArmName, Pinned] = {}
    """Sides of comparisons that are being made, each asked by whoever makes it."""

    @property
    def served(self) -> dict[str, Pinned]:
        """All that nodes are to serve, by its id."""
        return {one.arm_id: one for one in (*self.by_name.values(), *self.compared.values())}


Level = Annotated[str, Meta(pattern=r"\A-?[0-9]{1,3}\Z")]


class ArmTicket(EvalTicket, frozen=True, kw_only=True):
    """The right to answer one prompt of an arm once, by both sides; ``index`` is a row of the training tasks."""

    arm: ArmName
    arm_id: TokenText
    number: Count
    """Of the arm's prompts, from 1."""
    num_samples: Annotated[int, Meta(ge=0, le=MAX_SAMPLES)] = 0
    """0 has both sides answer as in training; else the arm answers a held-out row alone, as in an evaluation of so many
    answers to each: ``index`` is its place among the rows of its workflow, and ``sample`` says which answer."""

    @property
    def answer(self) -> str:
        return f"{self.arm_id}.{self.number}"


class ArmResult(Record, frozen=True, kw_only=True):
    """What both sides made of one prompt."""

    arm_id: TokenText
    number: Count
    pinned: EvalResult
    """The arm's answer."""
    newest: EvalResult
    """That of the policy under training."""


class ArmAnswer(Record, frozen=True, kw_only=True):
    """What an arm alone made of a held-out row."""

    arm_id: TokenText
    number: Count
    result: EvalResult
    text: Annotated[str, Meta(max_length=MAX_TEXT_CHARACTERS)] = ""
    """What the model said, cut off where that is long."""


class OpenPrompt(msgspec.Struct, frozen=True, array_like=True):
    """A prompt of an arm that is asked and not counted."""

    index: Count
    """Of its row."""
    attempt: Count = 0


class ArmState(Record, frozen=True, kw_only=True):
    """KV ``arm.<name>``: how far an arm is. The controller moves it on before it publishes what is asked anew, and
    before it acks the results that it has counted."""

    arm_id: TokenText
    num_asked: Count = 0
    open: Annotated[list[OpenPrompt], Meta(max_length=MAX_OPEN)] = []
    """The newest of those asked. Results are counted in the order of their prompts, so that quick answers come no
    sooner than slow ones."""
    levels: dict[Level, Count] = {}
    """Difference, arm less newest, in ``LEVELS`` parts of the reach -> pairs that have it."""
    low: float = 0.0
    high: float = 0.0
    """Ends of the confidence sequence; both 0 before the first pair."""
    pinned_total: float = 0.0
    newest_total: float = 0.0
    """Rewards of either side over all pairs, summed."""
    num_wins: Count = 0
    num_losses: Count = 0
    """Pairs in which the arm has more, or less."""
    num_failed: Count = 0
    """Prompts to which a side has no reward: they are no pair."""
    last_failure: str = ""
    oldest: OptionalVersionText = ""
    newest: OptionalVersionText = ""
    """Versions that it was compared with."""
    decided_at: Count = 0
    """Pairs after which the interval no longer held 0; 0 while it does."""
    is_told: bool = False
    """An event has told of that."""

    @property
    def num_counted(self) -> int:
        """Prompts that are over, those without a pair among them."""
        return self.num_asked - len(self.open)

    @property
    def num_pairs(self) -> int:
        return sum(self.levels.values())

    @property
    def difference(self) -> float | None:
        """Mean reward of the arm less that of the newest weights."""
        return (self.pinned_total - self.newest_total) / self.num_pairs if self.num_pairs else None


def summary(arm: Arm, state: ArmState) -> dict[str, Any]:
    """Return what people and dashboards see of an arm; numbers that nothing is known of yet are None."""
    return {
        "version": arm.version or arm.path,
        "share": arm.share,
        "alpha": arm.alpha,
        "num_asked": state.num_asked,
        "num_open": len(state.open),
        "num_pairs": state.num_pairs,
        "num_wins": state.num_wins,
        "num_losses": state.num_losses,
        "num_failed": state.num_failed,
        "last_failure": state.last_failure,
        "difference": state.difference,
        "low": state.low if state.num_pairs else None,
        "high": state.high if state.num_pairs else None,
        "decided_at": state.decided_at,
        "compared_with": state.newest if state.oldest == state.newest else f"{state.oldest} to {state.newest}",
    }
