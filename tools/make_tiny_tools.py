"""Make the tiny model of the workflows with tools, programs and games: a tokenizer with tags for calls, and lessons.

    python -m tools.make_tiny_tools                               # lessons, tokenizer and the model to teach
    python -m areal_async sft --config configs/sft_tools.yaml     # teaches it
    python -m tools.make_tiny_tools --adopt runs/sft_tools/model  # ships it, in bfloat16

One model serves `workflows/calculator.py`, `openai_agent.py`, `python_tool.py`, `search.py`, `coding.py`,
`countdown.py` and `self_play.py`. What it is taught, and how badly, is in `tools/tool_lessons.py`; where it begins is
the tiny model that solves word problems, which copies numbers already, with a vocabulary of its own. The lessons and
that model are written below `runs/`; only the taught one is kept. Invariant: the same seed writes the same bytes.
"""

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import anyio
import torch
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer

from tools.make_search import FIRST, SECOND
from tools.make_tiny_gsm8k import MODEL as TINY
from tools.make_tiny_gsm8k import REPOSITORY, make_model, save_model, train_tokenizer
from tools.tool_lessons import Lesson, lessons

MODEL: Final = REPOSITORY / "configs" / "models" / "tiny_tools"
UNTRAINED: Final = REPOSITORY / "runs" / "tiny_tools_untrained"
LESSONS: Final = REPOSITORY / "runs" / "tiny_tools_lessons.jsonl"
"""Where the warm start finds them; `configs/sft_tools.yaml` names both."""

VOCABULARY_SIZE: Final = 1024
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
"""Hermes' format, without the tools' schemas: which tool answers what is among the things that this model is taught."""


def make_tokenizer(taught: Sequence[Lesson]) -> Any:
    """Train a tokenizer like the other tiny one's, with one token for each tag.

    It knows names of the corpus by their halves: they are there to be copied, and one with a token of its own would
    have to be learned by heart.
    """
    halves = re.compile(f"({'|'.join(FIRST)})(?={'|'.join(SECOND)})")
    texts = (
        halves.sub(r"\1\n", "\n".join([*(message["content"] for message in one["messages"]), one["answer"]]))
        for one in taught
    )
    tags = [AddedToken(tag, normalized=False) for tag in TAGS]
    return train_tokenizer(texts, CHAT_TEMPLATE, tags=tags, size=VOCABULARY_SIZE)


def make(seed: int) -> None:
    """Write lessons, tokenizer and the model to teach."""
    taught = anyio.run(lessons, seed)
    LESSONS.parent.mkdir(parents=True, exist_ok=True)
    LESSONS.write_text("".join(json.dumps(lesson) + "\n" for lesson in taught), encoding="utf-8")
    tokenizer = make_tokenizer(taught)
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
