"""What a pipeline's ranks wait for each other, and what fills up the states that they send.

    python -m tools.bench_pipeline
    python -m tools.bench_pipeline --groups 16 --token-budgets 1024,4096

Draws the batches of ``tools/bench_lengths.py``, divides them as a training step does, and prints for each number of
ranks and both schedules the rows that the batch needs and those that it is divided into, the bubble, and which share
of the sent states is of no token. The bubble counts all rows and stages as alike (``bubble``): rows are
balanced by cost, and layers are cut by it.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from areal_async.trainer.engine.parallel.execution import num_microbatches
from areal_async.trainer.packing.flops import DecoderFlops
from areal_async.trainer.packing.pack import pack, part_costs, spread
from tools.bench_lengths import KINDS, draw


@dataclass(frozen=True, slots=True)
class Filled:
    """A batch in a pipeline."""

    least: int
    """Rows that the batch needs."""
    num_rows: int
    """Rows that the batch is divided into."""
    idle: float
    """Share of the time of a rank."""
    sent_empty: float
    """Share of the states sent that is of no token."""


def filled(
    lengths: Sequence[int], *, token_budget: int, num_ranks: int, stages_per_rank: int, flops: DecoderFlops
) -> Filled:
    """Divide a batch and send it through the stages."""
    costs = [flops.forward(length, length) for length in lengths]
    least = len(pack(lengths, token_budget=token_budget))
    num_rows = num_microbatches(least, num_ranks=num_ranks, is_interleaved=stages_per_rank > 1)
    tokens = part_costs(spread(lengths, costs, token_budget=token_budget, num_rows=num_rows), lengths)
    return Filled(
        least,
        num_rows,
        bubble(num_rows, num_ranks=num_ranks, stages_per_rank=stages_per_rank),
        1.0 - sum(tokens) / (num_rows * max(tokens)),
    )


def bubble(num_microbatches: int, *, num_ranks: int, stages_per_rank: int) -> float:
    """Return the share of its time that a rank waits, were all microbatches and stages alike.

    Source: Narayanan et al. 2021, arXiv 2104.04473, section 2.2: (p - 1) / v microbatches' time is added to m.
    """
    idle = (num_ranks - 1) / stages_per_rank
    return idle / (num_microbatches + idle)


def main() -> None:
    """Print the table."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from areal_async.trainer.packing.flops import decoder_flops

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="configs/models/tiny")
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--token-budgets", default="512,2048,8192")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    flops = decoder_flops(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(arguments.model)))
    print(f"{'lengths':<8} {'tokens':>8} {'budget':>6} {'ranks':>5} {'stages':>6} {'least':>5} {'rows':>4} "
          f"{'idle':>6} {'sent empty':>10}")  # fmt: skip
    for kind in KINDS:
        drawn = draw(kind, tokenizer, groups=arguments.groups, group_size=arguments.group_size, seed=arguments.seed)
        lengths = [length for prompted in drawn for length in prompted.lengths]
        for token_budget in map(int, arguments.token_budgets.split(",")):
            for num_ranks, per_rank in ((2, 1), (2, 2), (4, 1), (4, 2), (8, 1), (8, 2)):
                one = filled(
                    lengths, token_budget=token_budget, num_ranks=num_ranks, stages_per_rank=per_rank, flops=flops
                )
                print(f"{kind:<8} {sum(lengths):>8,} {token_budget:>6,} {num_ranks:>5} {num_ranks * per_rank:>6} "
                      f"{one.least:>5} {one.num_rows:>4} {one.idle:>6.1%} {one.sent_empty:>10.1%}")  # fmt: skip


if __name__ == "__main__":
    main()
