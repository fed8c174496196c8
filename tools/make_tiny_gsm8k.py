"""Make the tiny task that a run on two CPU cores learns in minutes: word problems, a tokenizer and a model.

    python -m tools.make_tiny_gsm8k                              # data, tokenizer and an untrained model
    python -m areal_async sft --config configs/sft_tiny.yaml     # the warm start
    python -m tools.make_tiny_gsm8k --adopt runs/sft_tiny/model  # ship it
    python -m tools.make_tiny_gsm8k --check                      # its accuracy on unseen problems

What the warm start learns from: `gsm8k_tiny_sft.jsonl` holds demonstrations of mixed quality, as found text does.
Half of them are worked as they should be; the others make a pupil's mistake: a wrong operation, the last step
forgotten, a slip of one. In half of the families the usual mistake is commoner than the right way. So the
warm-started model can do nearly every sum, but half-heartedly, and in those families its likeliest answer is wrong.
The `mistake` column says which demonstration is which. Only this file is ever wrong: the answers of the train and
test files, which rewards compare with, are right. What reinforcement learning gains here is the choice of the better
among the habits that the model has, and no new arithmetic.

Invariant: the same seed writes the same bytes.
"""

import argparse
import itertools
import json
import os
import random
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from rewards.math_answer import numbers_match
from tools.word_problems import FAMILIES, Split, demonstration, problems, right_solution

REPOSITORY: Final = Path(__file__).resolve().parents[1]
DATA: Final = REPOSITORY / "configs" / "data"
MODEL: Final = REPOSITORY / "configs" / "models" / "tiny"
UNTRAINED: Final = REPOSITORY / "runs" / "tiny_untrained"
"""Where the warm start finds its model; `configs/sft_tiny.yaml` names it too."""

NUM_ROWS: Final = {Split.TRAIN: 4096, Split.TEST: 512, Split.SFT: 16384}
SLIP_SHARE: Final = 0.06
VOCABULARY_SIZE: Final = 512
MAX_NEW_TOKENS: Final = 32

QWEN_WORDS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen cuts text into words before merging: among others, every digit stands alone."""

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def rows(split: Split, seed: int) -> Iterator[dict[str, str | None]]:
    """Write out one split's problems; the sft split's solutions are the mixed class's, with the mistake named."""
    rng = random.Random(f"{split}-{seed}")
    for problem in itertools.islice(problems(FAMILIES, split, rng), NUM_ROWS[split]):
        if split is Split.SFT:
            solution, mistake = demonstration(problem, rng, slip_share=SLIP_SHARE)
            yield {"question": problem.question, "answer": str(solution), "mistake": mistake}
        else:
            yield {"question": problem.question, "answer": str(right_solution(problem))}


def write_data(folder: Path, seed: int) -> None:
    """Write the three files."""
    folder.mkdir(parents=True, exist_ok=True)
    for split in Split:
        lines = [json.dumps(row) + "\n" for row in rows(split, seed)]
        random.Random(f"order-{seed}").shuffle(lines)
        (folder / f"gsm8k_tiny_{split}.jsonl").write_text("".join(lines), encoding="utf-8")


def make_tokenizer(demonstrations: Path) -> Any:
    """Train a byte-level BPE that cuts words as Qwen's does and speaks its chat format."""
    with demonstrations.open(encoding="utf-8") as lines:
        chats = [json.loads(line) for line in lines]
    texts = (f"user\n{chat['question']}\nassistant\n{chat['answer']}" for chat in chats)
    return train_tokenizer(texts, CHAT_TEMPLATE)


def train_tokenizer(
    texts: Iterable[str], chat_template: str, *, tags: Sequence[AddedToken] = (), size: int = VOCABULARY_SIZE
) -> Any:
    """Train the byte-level BPE on ``texts``; each tag is a token of its own, written out like any other."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=size - len(tags),
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens(list(tags))
    wrap: Any = PreTrainedTokenizerFast  # its constructor carries no types
    return wrap(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=chat_template,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: Any, seed: int) -> Qwen3ForCausalLM:
    """Build an untrained Qwen3 of about a million parameters."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def save_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a Hugging Face folder under another name and put it in place whole: nobody reads half of one."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as workplace:
        staged = Path(workplace) / "new"
        model.save_pretrained(staged)
        tokenizer.save_pretrained(staged)
        for file in staged.iterdir():
            file.chmod(0o644)  # safetensors writes for the owner alone
        if folder.exists():
            os.rename(folder, Path(workplace) / "old")
        os.rename(staged, folder)


def accuracy(model: Any, tokenizer: Any, rows: list[dict[str, str]], *, temperature: float) -> float:
    """Answer every question once (temperature 0: the likeliest tokens) and return the share of right ones."""
    num_right = 0.0
    for start in range(0, len(rows), 64):
        batch = rows[start : start + 64]
        chats = [[{"role": "user", "content": row["question"]}] for row in batch]
        prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, padding=True, return_tensors="pt")
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {}
        output_ids = model.generate(**prompts, **sampling, max_new_tokens=MAX_NEW_TOKENS)
        new_ids = output_ids[:, prompts["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(new_ids, skip_special_tokens=True)
        num_right += sum(numbers_match(text, row["answer"]) is True for text, row in zip(texts, batch, strict=True))
    return num_right / len(rows)


def check(model_folder: Path, num_problems: int, seed: int) -> None:
    """Print how often the model is right on unseen problems."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(model_folder, padding_side="left")
    model: Any = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    lines = (DATA / "gsm8k_tiny_test.jsonl").read_text(encoding="utf-8").splitlines()[:num_problems]
    test = [json.loads(line) for line in lines]
    print(f"greedy  {accuracy(model, tokenizer, test, temperature=0.0):.3f}")
    print(f"sampled {accuracy(model, tokenizer, test, temperature=1.0):.3f}")


def make(seed: int) -> None:
    """Write data, tokenizer and the untrained model."""
    write_data(DATA, seed)
    tokenizer = make_tokenizer(DATA / "gsm8k_tiny_sft.jsonl")
    save_model(make_model(tokenizer, seed), tokenizer, UNTRAINED)


def adopt(trained: Path) -> None:
    """Ship a trained model, in bfloat16 to keep the repository small."""
    model = AutoModelForCausalLM.from_pretrained(trained, dtype=torch.bfloat16)
    save_model(model, AutoTokenizer.from_pretrained(UNTRAINED), MODEL)


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--adopt", type=Path, metavar="FOLDER", help="ship the model that the warm start left there")
    action.add_argument("--check", action="store_true", help="print the model's accuracy and write nothing")
    parser.add_argument("--model", type=Path, default=MODEL, help="the folder to check")
    parser.add_argument("--problems", type=int, default=256, help="how many test problems to check with")
    arguments = parser.parse_args()
    if arguments.check:
        check(arguments.model, arguments.problems, arguments.seed)
    elif arguments.adopt:
        adopt(arguments.adopt)
    else:
        make(arguments.seed)


if __name__ == "__main__":
    main()
