"""Aggregation: how the losses of tokens become one number, as a weight on each token and a share of the denominator.

The loss of an update is ``sum_t weight_t loss_t / sum_t unit_t``, both sums over every token of the mini-batch, over
all rows and ranks. So it does not matter how sequences are packed or which rank holds them. Pure, without torch.

Letters: |o_i| trained tokens of trajectory i, N trajectories, M of them together.

==============  ===============================  ==========  =========
name            loss                             weight      unit
==============  ===============================  ==========  =========
token_mean      (1/M) sum_i sum_t                1           1
sequence_mean   (1/N) sum_i (1/|o_i|) sum_t      1 / |o_i|   1 / |o_i|
sequence_sum    (1/N) sum_i sum_t                1           1 / |o_i|
constant        (1/N) sum_i (1/L) sum_t          1 / L       1 / |o_i|
==============  ===============================  ==========  =========
"""

from typing import Literal, NamedTuple

AggregationName = Literal["token_mean", "sequence_mean", "sequence_sum", "constant"]


class TokenShare(NamedTuple):
    """What each trained token of one trajectory counts."""

    weight: float = 1.0
    unit: float = 1.0


class Aggregation(NamedTuple):
    """A way to aggregate.

    Source: token_mean, DAPO, arXiv 2503.14476 eq. 12 (there within each group; here, as is usual, over the
    mini-batch); sequence_mean, GRPO, arXiv 2402.03300 eq. 3; constant, Dr.GRPO, arXiv 2503.20783, with L the
    longest answer; sequence_sum, the log likelihood of a whole answer, RLOO, arXiv 2402.14740.
    """

    name: AggregationName = "token_mean"
    constant: float = 1.0
    """L, the length in tokens that ``constant`` alone divides by."""

    def share(self, num_tokens: int) -> TokenShare:
        """Return the share of each trained token of a trajectory that has ``num_tokens`` of them."""
        if self.name == "token_mean" or not num_tokens:
            return TokenShare()
        if self.name == "sequence_mean":
            return TokenShare(1.0 / num_tokens, 1.0 / num_tokens)
        return TokenShare(1.0 / self.constant if self.name == "constant" else 1.0, 1.0 / num_tokens)


TOKEN_MEAN = Aggregation()
