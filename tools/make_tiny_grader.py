"""Make the tiny grader: a model that reads a word problem, its right answer and somebody's, and writes a score.

    python -m tools.make_tiny_grader                               # tokenizer, a model to teach and its lessons
    python -m areal_async sft --config configs/sft_grader.yaml     # teaches it
    python -m tools.make_tiny_grader --adopt runs/sft_grader/model # ships it, in bfloat16
    python -m tools.make_tiny_grader --check                       # how often it is right about unseen answers

Its lessons are asked as `workflows/judge.py` asks, and are answered as a careful judge does, who says first what was
expected and what came: `Expected 17, got 19. Score: 0`. The answers to grade are right ones, a pupil's mistakes, and
what a model says that does not speak well yet: another number at the end, none at all, a solution cut short, a word too
many. Which of them is right is decided by the rule that the tiny run is otherwise scored by. The problems are those of
the sft split, so that no question of a run was ever graded in a lesson.

It begins as the tiny model that solves such problems, which copies numbers already, with a vocabulary of its own.
Lessons and that model are written below `runs/`; only the taught one is kept. Invariant: the same seed writes
the same bytes.
"""

import argparse
import itertools
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rewards.judge import TEN as SCALE
from rewards.judge import parse_score, score_request
from rewards.math_answer import last_number, marked_answer, numbers_match
from tools.make_tiny_gsm8k import CHAT_TEMPLATE, REPOSITORY, save_model, train_tokenizer
from tools.make_tiny_tools import transplant
from tools.word_problems import FAMILIES, Problem, Split, demonstration, problems, right_solution
from workflows.judge import TEMPLATE

MODEL: Final = REPOSITORY / "configs" / "models" / "tiny_grader"
UNTRAINED: Final = REPOSITORY / "runs" / "tiny_grader_untrained"
LESSONS: Final = REPOSITORY / "runs" / "tiny_grader_lessons.jsonl"
"""Where the warm start finds them; `configs/sft_grader.yaml` names both."""

NUM_LESSONS: Final = 16384
MAX_NEW_TOKENS: Final = 24
_DIGIT: Final = re.compile(r"[0-9]")


def lessons(split: Split, seed: int) -> Iterator[dict[str, Any]]:
    """Yield questions to a judge, and what a careful one says, without end; half of the answers are right ones.

    Which half is drawn by lot: families come in turn, and a pattern would let the kind of problem tell the score.
    """
    rng = random.Random(f"grader-{split}-{seed}")
    for problem in problems(FAMILIES, split, rng):
        is_right = rng.random() < 0.5
        reference = str(right_solution(problem))
        answer = next(one for one in attempts(problem, rng) if (numbers_match(one, reference) is True) is is_right)
        request = score_request(TEMPLATE, question=problem.question, answer=answer, reference=reference)
        yield {"messages": [{"role": "user", "content": request}], "answer": verdict(answer, reference)}


def attempts(problem: Problem, rng: random.Random) -> Iterator[str]:
    """Yield answers to a problem without end, from the worked ones of a pupil to what is hardly one."""
    while True:
        solution, _ = demonstration(problem, rng, slip_share=0.2)
        right = str(right_solution(problem))
        said = rng.choice([str(solution), right, right])
        match rng.randrange(8):
            case 0:  # another number at the end
                said = f"{said.rpartition(' ')[0]} {rng.randrange(100)}"
            case 1:  # one digit is another
                places = [found.start() for found in _DIGIT.finditer(said)]
                place = rng.choice(places[-2:])
                said = f"{said[:place]}{rng.randrange(10)}{said[place + 1 :]}"
            case 2:  # the number alone
                said = said[said.index("####") :]
            case 3:  # cut short
                said = said[: rng.randrange(len(said))]
            case 4:  # sums of another problem
                said = f"{rng.randrange(100)}{rng.choice('+-*')}{rng.randrange(10)}={rng.randrange(100)}\n{said}"
            case 5:  # a question thrown in
                said = f"{problem.question[: rng.randrange(20)]}{said}"
        yield said


def verdict(answer: str, reference: str) -> str:
    """Return what a careful judge says."""
    marked = marked_answer(answer)
    got = last_number(answer) if marked is None else marked or None
    score = SCALE.high if numbers_match(answer, reference) is True else SCALE.low
    return f"Expected {marked_answer(reference)}, got {'nothing' if got is None else got}. Score: {score:g}"


def make(seed: int) -> None:
    """Write lessons, tokenizer and the model to teach."""
    rows = list(itertools.islice(lessons(Split.SFT, seed), NUM_LESSONS))
    LESSONS.parent.mkdir(parents=True, exist_ok=True)
    LESSONS.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    texts = ("\n".join([row["messages"][0]["content"], row["answer"]]) for row in rows)
    tokenizer = train_tokenizer(texts, CHAT_TEMPLATE)
    save_model(transplant(tokenizer, seed), tokenizer, UNTRAINED)


def adopt(trained: Path) -> None:
    """Ship a trained model, in bfloat16 to keep the repository small."""
    model = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.bfloat16)
    save_model(model, AutoTokenizer.from_pretrained(UNTRAINED), MODEL)


def shares_agreed(folder: Path, num_answers: int, seed: int) -> dict[bool, float]:
    """Return how often the grader is right about right answers and about wrong ones, to problems it has not seen."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rows = list(itertools.islice(lessons(Split.TEST, seed), num_answers))
    counts = {True: [0, 0], False: [0, 0]}
    for start in range(0, len(rows), 64):
        batch = rows[start : start + 64]
        prompts: Any = tokenizer.apply_chat_template(
            [row["messages"] for row in batch], add_generation_prompt=True, padding=True, return_tensors="pt",
            return_dict=True,
        )  # fmt: skip
        output_ids = model.generate(**prompts, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        texts: list[str] = tokenizer.batch_decode(
            output_ids[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True
        )
        for row, text in zip(batch, texts, strict=True):
            expected = parse_score(row["answer"], SCALE)
            count = counts[expected == SCALE.high]
            count[0] += parse_score(text, SCALE) == expected
            count[1] += 1
    return {is_right: num_agreed / num_all for is_right, (num_agreed, num_all) in counts.items()}


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--adopt", type=Path, metavar="FOLDER", help="ship the model that the lessons left there")
    action.add_argument("--check", action="store_true", help="print how often the grader is right and write nothing")
    parser.add_argument("--model", type=Path, default=MODEL, help="the folder to check")
    parser.add_argument("--answers", type=int, default=1024, help="how many answers to check with")
    arguments = parser.parse_args()
    if arguments.check:
        for is_right, share in shares_agreed(arguments.model, arguments.answers, arguments.seed).items():
            print(f"{'right' if is_right else 'wrong'} answers graded as such: {share:.3f}")
    elif arguments.adopt:
        adopt(arguments.adopt)
    else:
        make(arguments.seed)


if __name__ == "__main__":
    main()
