"""How long prompts and answers are in the trainer's benchmarks, and what packing leaves unused of them.

    python -m tools.bench_lengths

No process is started: how a batch falls into ranks and rows is arithmetic. More ranks get a larger batch, as many
groups for each: every rank has as many rows as the one with the most, so what is left over is about half a row of
each, and how much that is depends on how many rows a rank has.

Two kinds: ``gsm8k``, the shipped word problems with their worked answers, and ``heavy``, the same questions with
answers of Pareto-distributed length as in ``tools/heavy_tail.py``, up to what the tiny model's context holds.
"""

import argparse
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_async.trainer.engine.parallel.division import divisions
from areal_async.trainer.packing.flops import DecoderFlops
from areal_async.trainer.packing.pack import Parts, balance, pack, part_costs
from tools.heavy_tail import SHORTEST_TOKENS, TAIL_EXPONENT

QUESTIONS = Path("configs/data/gsm8k_tiny_sft.jsonl")
KINDS = ("gsm8k", "heavy")
LONGEST_TOKENS = 440
"""Longest heavy-tailed answer, in tokens; with the longest question it fits the tiny model's context of 512."""


@dataclass(frozen=True, slots=True)
class Prompted:
    """A prompt and how long its answers are."""

    prompt_ids: list[int]
    answer_lengths: list[int]

    @property
    def lengths(self) -> list[int]:
        """Lengths of its sequences in tokens, prompts included."""
        return [len(self.prompt_ids) + length for length in self.answer_lengths]


def draw(kind: str, tokenizer: Any, *, groups: int, group_size: int, seed: int) -> list[Prompted]:
    """Return prompts, each with the lengths of ``group_size`` answers."""
    chance = random.Random(seed)
    rows = [json.loads(line) for line in QUESTIONS.read_text(encoding="utf-8").splitlines()]
    answers = [len(ids) + 1 for ids in tokenizer([row["answer"] for row in rows])["input_ids"]]
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": row["question"]}], add_generation_prompt=True, tokenize=False
        )
        for row in chance.sample(rows, groups)
    ]
    prompts = tokenizer(texts, add_special_tokens=False)["input_ids"]

    def length() -> int:
        if kind == "gsm8k":
            return chance.choice(answers)
        return min(LONGEST_TOKENS, int(SHORTEST_TOKENS * chance.paretovariate(TAIL_EXPONENT)))

    return [Prompted(list(ids), [length() for _ in range(group_size)]) for ids in prompts]


@dataclass(frozen=True, slots=True)
class Packed:
    """The packing of a batch in figures."""

    num_rows: int
    """Rows on all ranks, empty ones included."""
    fewest_rows: int
    """Rows that would hold the tokens if sequences could be cut, as many on every rank."""
    waste: float
    """Share of the rows' token budget that no token fills."""
    idle: float
    """Share of the ranks' time that they wait for the slowest, by the cost model."""


def divide_shares(
    lengths: Sequence[Sequence[int]], costs: Sequence[Sequence[int]], *, token_budget: int
) -> list[Parts]:
    """Return what ``division.divide`` comes to on every rank, from the sequences of them all. Pure.

    Raises:
        UserError: a sequence is longer than a row.
    """
    num_rows = max(len(pack(own, token_budget=token_budget)) for own in lengths)
    ways = [
        divisions(own, dear, token_budget=token_budget, num_rows=num_rows)
        for own, dear in zip(lengths, costs, strict=True)
    ]

    def takes(number: int) -> int:
        rows = [part_costs(own[number], dear) for own, dear in zip(ways, costs, strict=True)]
        return sum(max(met) for met in zip(*rows, strict=True))

    best = min(range(len(ways[0])), key=takes) if len(lengths) > 1 else 0
    return [own[best] for own in ways]


def packed(lengths: Sequence[int], *, token_budget: int, num_ranks: int, flops: DecoderFlops) -> Packed:
    """Divide a batch over ranks and rows as a training step does."""
    costs = [flops.forward(length, length) for length in lengths]
    shares = balance(costs, num_ranks=num_ranks)
    own_costs = [[costs[i] for i in share] for share in shares]
    parts = divide_shares([[lengths[i] for i in share] for share in shares], own_costs, token_budget=token_budget)
    rows = [part_costs(own, dear) for own, dear in zip(parts, own_costs, strict=True)]
    takes = sum(max(met) for met in zip(*rows, strict=True))
    num_rows = len(parts[0]) * num_ranks
    return Packed(
        num_rows=num_rows,
        fewest_rows=-(-sum(lengths) // (token_budget * num_ranks)) * num_ranks,
        waste=1.0 - sum(lengths) / (num_rows * token_budget),
        idle=1.0 - sum(costs) / (takes * num_ranks),
    )


def main() -> None:
    """Print a table of waste and idle time."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from areal_async.trainer.packing.flops import decoder_flops

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="configs/models/tiny")
    parser.add_argument("--groups", type=int, default=128, help="for each rank")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    flops = decoder_flops(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(arguments.model)))
    print(f"{'lengths':<8} {'sequences':>9} {'tokens':>8} {'longest':>7} {'budget':>6} {'ranks':>5} {'rows':>4} "
          f"{'fewest':>6} {'waste':>6} {'idle':>6}")  # fmt: skip
    for kind in KINDS:
        for num_ranks in (1, 2, 4):
            groups = arguments.groups * num_ranks
            drawn = draw(kind, tokenizer, groups=groups, group_size=arguments.group_size, seed=arguments.seed)
            lengths = [length for prompted in drawn for length in prompted.lengths]
            for token_budget in (512, 1024, 2048):
                one = packed(lengths, token_budget=token_budget, num_ranks=num_ranks, flops=flops)
                print(f"{kind:<8} {len(lengths):>9,} {sum(lengths):>8,} {max(lengths):>7} {token_budget:>6,} "
                      f"{num_ranks:>5} {one.num_rows:>4} {one.fewest_rows:>6} {one.waste:>6.1%} {one.idle:>6.1%}"
                )  # fmt: skip


if __name__ == "__main__":
    main()
