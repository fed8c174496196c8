"""Make the tiny task in which a tool pays: sums of three digits, a tokenizer with tags for calls, and a model.

    python -m tools.make_tiny_calculator                               # data, tokenizer and a model to fine-tune
    python -m areal_async sft --config configs/sft_calculator.yaml     # the warm start
    python -m tools.make_tiny_calculator --adopt runs/sft_calculator/model

What the warm start learns from: `calculator_sft.jsonl` holds demonstrations of a pupil who has a calculator and does
not always reach for it. Some answer out of their head, which a model of this size cannot; some call the calculator
properly; some fumble the call (JSON that does not close, a tool or an argument that does not exist, the wrong sum)
and are told so, then try again or give up. So the warm-started model knows how to call, and seldom does it well. What
reinforcement learning gains here is the habit of calling, and of calling properly.

The demonstrations' tool answers are what the workflow's own tool says, through the same parser and checks.
Invariant: the same seed writes the same bytes, and no split holds a sum of another.
"""

import argparse
import hashlib
import itertools
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import anyio
import torch
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_async.contracts import ToolCall
from areal_async.rollout.tools.parse import parse_reply
from areal_async.rollout.tools.run import Toolbox
from tools.make_tiny_gsm8k import DATA, REPOSITORY, make_model, save_model, train_tokenizer
from tools.make_tiny_gsm8k import MODEL as TINY
from tools.word_problems import Split
from workflows.calculator import calculate

MODEL: Final = REPOSITORY / "configs" / "models" / "tiny_calculator"
UNTRAINED: Final = REPOSITORY / "runs" / "tiny_calculator_untrained"
"""Where the warm start finds its model; `configs/sft_calculator.yaml` names it too."""

NUM_ROWS: Final = {Split.TRAIN: 4096, Split.TEST: 512, Split.SFT: 12288}
TAGS: Final = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}<|im_start|>user\n"
    "<tool_response>{{ message['content'] }}</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Hermes' format, without the tools' schemas: this model has one tool, and its warm start is what taught it that."""

PHRASINGS: Final = {
    "+": ("What is {a} plus {b}?", "Add {b} to {a}.", "How much are {a} and {b} together?"),
    "-": ("What is {a} minus {b}?", "Take {b} from {a}.", "How much is left of {a} without {b}?"),
    "*": ("What is {a} times {b}?", "Multiply {a} by {b}.", "How much are {a} boxes of {b}?"),
}

HEAD_SHARE: Final = 0.45
FUMBLE_SHARE: Final = 0.3
GIVE_UP_SHARE: Final = 0.5
"""Of those who fumbled and were told so."""


@dataclass(frozen=True, slots=True)
class Sum:
    """One question."""

    question: str
    a: int
    operation: str
    b: int

    @property
    def expression(self) -> str:
        return f"{self.a}{self.operation}{self.b}"

    @property
    def answer(self) -> int:
        return {"+": self.a + self.b, "-": self.a - self.b, "*": self.a * self.b}[self.operation]

    @property
    def split(self) -> Split:
        """Say which split this sum belongs to: a quarter each for train and test, the rest for sft."""
        bucket = hashlib.sha256(self.expression.encode()).digest()[0] % 4
        return (Split.TRAIN, Split.TEST, Split.SFT, Split.SFT)[bucket]


def sums(split: Split, rng: random.Random) -> Iterator[Sum]:
    """Draw distinct sums of one split without end, one operation after the other."""
    seen: set[str] = set()
    for operation in itertools.cycle(PHRASINGS):
        while True:
            a, b = rng.randint(100, 999), rng.randint(100, 999)
            if operation == "-":
                a, b = max(a, b), min(a, b)
            phrasing = rng.choice(PHRASINGS[operation])
            drawn = Sum(phrasing.format(a=a, b=b), a, operation, b)
            if drawn.split is split and drawn.expression not in seen:
                break
        seen.add(drawn.expression)
        yield drawn


def rows(split: Split, seed: int) -> Iterator[dict[str, Any]]:
    """Write out one split; the sft split's rows are turns of demonstrations."""
    rng = random.Random(f"calculator-{split}-{seed}")
    if split is Split.SFT:
        turns = (turn for one in sums(split, rng) for turn in demonstration(one, rng))
        yield from itertools.islice(turns, NUM_ROWS[split])
    else:
        for one in itertools.islice(sums(split, rng), NUM_ROWS[split]):
            yield {"question": one.question, "answer": f"#### {one.answer}"}


def demonstration(one: Sum, rng: random.Random) -> Iterator[dict[str, Any]]:
    """Yield what the pupil was told and what he said, turn after turn."""
    messages: list[dict[str, str]] = [{"role": "user", "content": one.question}]
    dice = rng.random()
    if dice < HEAD_SHARE:
        yield {"messages": messages, "answer": f"#### {one.answer}"}
        return
    said = fumbled_call(one, rng) if dice < HEAD_SHARE + FUMBLE_SHARE else proper_call(one.expression)
    told = tool_answer(said)
    yield {"messages": messages, "answer": said}
    messages = [*messages, {"role": "assistant", "content": said}, {"role": "tool", "content": told}]
    if told.startswith("error") and rng.random() >= GIVE_UP_SHARE:
        said = proper_call(one.expression)
        told = tool_answer(said)
        yield {"messages": messages, "answer": said}
        messages = [*messages, {"role": "assistant", "content": said}, {"role": "tool", "content": told}]
    result = str(rng.randint(100, 999)) if told.startswith("error") else told
    yield {"messages": messages, "answer": f"#### {result}"}


def proper_call(expression: str) -> str:
    """Write a call as it should be."""
    call = json.dumps({"name": "calculate", "arguments": {"expression": expression}})
    return f"<tool_call>{call}</tool_call>"


def fumbled_call(one: Sum, rng: random.Random) -> str:
    """Write a call as it should not be."""
    proper = proper_call(one.expression)
    other = one.expression.replace(one.operation, rng.choice(sorted({"+", "-", "*"} - {one.operation})))
    return rng.choice(
        [
            proper.replace("}}", "}"),
            proper.replace('"calculate"', "calculate"),
            proper.replace('"expression"', '"sum"'),
            proper.replace("calculate", "compute"),
            proper_call(one.expression.replace(one.operation, " and ")),
            proper_call(other),
        ]
    )


def tool_answer(said: str) -> str:
    """Return what a workflow would tell the model of its one call."""
    (written,) = parse_reply(said, "hermes").calls
    call = ToolCall(id="", name=written.name, arguments=written.arguments, error=written.error)
    (result,) = anyio.run(Toolbox([calculate], timeout_s=60.0).run, [call])
    return result.text


def write_data(folder: Path, seed: int) -> None:
    """Write the three files."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in Split:
        lines = [json.dumps(row) + "\n" for row in rows(split, seed)]
        random.Random(f"order-{seed}").shuffle(lines)
        (folder / f"calculator_{split}.jsonl").write_text("".join(lines), encoding="utf-8")


def make_tokenizer(demonstrations: Path) -> Any:
    """Train a tokenizer like the other tiny one's, with one token for each tag."""
    with demonstrations.open(encoding="utf-8") as lines:
        chats = [json.loads(line) for line in lines]
    texts = ("\n".join([*(message["content"] for message in chat["messages"]), chat["answer"]]) for chat in chats)
    tags = [AddedToken(tag, normalized=False) for tag in TAGS]
    return train_tokenizer(texts, CHAT_TEMPLATE, tags=tags)


def make(seed: int) -> None:
    """Write data, tokenizer and the model to fine-tune."""
    write_data(DATA, seed)
    tokenizer = make_tokenizer(DATA / "calculator_sft.jsonl")
    save_model(transplant(tokenizer, seed), tokenizer, UNTRAINED)


def transplant(tokenizer: Any, seed: int) -> Any:
    """Return the tiny model, speaking another vocabulary: what both tokenizers know keeps its vector.

    It copies numbers out of a question already, which takes most of a warm start to learn.
    """
    grown: Any = make_model(tokenizer, seed)
    tiny: Any = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32)
    known = AutoTokenizer.from_pretrained(TINY).get_vocab()
    weights = {name: value.clone() for name, value in tiny.state_dict().items()}
    vectors = grown.get_input_embeddings().weight.detach().clone()
    old = tiny.get_input_embeddings().weight.detach()
    vectors *= old.std() / vectors.std()
    for token, index in tokenizer.get_vocab().items():
        if token in known:
            vectors[index] = old[known[token]]
    for name in ("model.embed_tokens.weight", "lm_head.weight"):  # one matrix under two names
        weights[name] = vectors
    grown.load_state_dict(weights)
    return grown


def adopt(trained: Path) -> None:
    """Ship a trained model, in bfloat16 to keep the repository small."""
    model = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.bfloat16)
    save_model(model, AutoTokenizer.from_pretrained(UNTRAINED), MODEL)


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--adopt", type=Path, metavar="FOLDER", help="ship the model that the warm start left there")
    arguments = parser.parse_args()
    if arguments.adopt:
        adopt(arguments.adopt)
    else:
        make(arguments.seed)


if __name__ == "__main__":
    main()
