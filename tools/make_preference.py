"""Make pairs of answers to word problems, of which one is preferred: what a reward model learns from.

    python -m tools.make_preference                                            # the pairs
    python -m areal_async reward-model --config configs/reward_model_tiny.yaml # the reward model, in two minutes
    python -m tools.make_preference --check runs/reward_model_tiny/model       # on numbers that it never saw
    python -m areal_async run workflows/preference.py                          # a policy that learns from it

The preferred answer is the right one. The other is mostly what a pupil says who takes the wrong operation or stops
before the last step, which is what the tiny model says half of the time; else one with a slip in a sum, cut short, or
with another number at its end. The problems are those of the sft split, so that no question of a run was ever judged in
a pair. Invariant: the same seed writes the same bytes.
"""

import argparse
import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from tools.make_tiny_gsm8k import REPOSITORY
from tools.word_problems import FAMILIES, Mistake, Problem, Split, mistaken_solution, problems, right_solution

PAIRS: Final = REPOSITORY / "configs" / "data" / "preference_pairs.jsonl"
"""`configs/reward_model_tiny.yaml` names it."""
NUM_PAIRS: Final = 4096
KINDS: Final = ("usual", "usual", "usual", "usual", "usual", "slip", "cut short", "another number")
"""Kinds of worse answers; each is drawn in proportion to its entries here."""


def pairs(split: Split, seed: int) -> Iterator[dict[str, str]]:
    """Yield questions, each with a right and a wrong answer, without end."""
    rng = random.Random(f"preference-{split}-{seed}")
    for problem in problems(FAMILIES, split, rng):
        kind = rng.choice(KINDS)
        chosen = str(right_solution(problem))
        yield {"question": problem.question, "chosen": chosen, "rejected": worse(problem, kind, rng), "kind": kind}


def worse(problem: Problem, kind: str, rng: random.Random) -> str:
    """Return a wrong answer of this kind."""
    right = right_solution(problem)
    match kind:
        case "usual":
            return str(mistaken_solution(problem, Mistake.USUAL, rng))
        case "slip":
            return str(mistaken_solution(problem, Mistake.SLIP, rng))
        case "cut short":
            return str(right)[: rng.randrange(str(right).index("####"))]
        case _:
            other = rng.choice([number for number in range(1, 100) if number != right.answer])
            return f"{str(right).rpartition(' ')[0]} {other}"


def make(seed: int) -> None:
    """Write the pairs."""
    rows = itertools.islice(pairs(Split.SFT, seed), NUM_PAIRS)
    PAIRS.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def shares_right(folder: Path, num_pairs: int, seed: int) -> dict[str, float]:
    """Return how often a reward model prefers the right answer to unseen problems, by kind of the other."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    right, counts = Counter[str](), Counter[str]()
    for row in itertools.islice(pairs(Split.TEST, seed), num_pairs):
        scores = []
        for answer in (row["chosen"], row["rejected"]):
            messages = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": answer}]
            inputs = tokenizer.apply_chat_template(messages, return_tensors="pt", return_dict=True)
            with torch.no_grad():
                scores.append(model(**inputs).logits.item())
        for kind in (row["kind"], "all"):
            right[kind] += scores[0] > scores[1]
            counts[kind] += 1
    return {kind: right[kind] / count for kind, count in counts.items()}


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--check", type=Path, metavar="FOLDER", help="print how often this model is right instead")
    parser.add_argument("--pairs", type=int, default=1024, help="how many pairs to check with")
    arguments = parser.parse_args()
    if arguments.check is None:
        make(arguments.seed)
        return
    for kind, share in shares_right(arguments.check, arguments.pairs, arguments.seed).items():
        print(f"{kind}: {share:.3f}")


if __name__ == "__main__":
    main()
