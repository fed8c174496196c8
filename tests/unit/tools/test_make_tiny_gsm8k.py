"""The shipped tiny task is what the tool makes: small, reproducible, and answered within a completion of 32 tokens."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from tools.make_tiny_gsm8k import DATA, MAX_NEW_TOKENS, MODEL, make_tokenizer, rows, write_data
from tools.word_problems import Split


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


def shipped(split: Split) -> list[dict[str, str]]:
    lines = (DATA / f"gsm8k_tiny_{split}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_shipped_data_is_what_the_tool_writes(tmp_path: Path) -> None:
    write_data(tmp_path, seed=1)

    for split in Split:
        name = f"gsm8k_tiny_{split}.jsonl"
        assert (tmp_path / name).read_bytes() == (DATA / name).read_bytes()


def test_another_seed_asks_other_questions() -> None:
    others = {row["question"] for row in rows(Split.TEST, seed=2)}

    assert len(others & {row["question"] for row in shipped(Split.TEST)}) < len(others) / 2


def test_data_and_model_together_stay_under_ten_megabytes() -> None:
    files = [*DATA.glob("gsm8k_tiny_*"), *MODEL.iterdir()]

    assert sum(file.stat().st_size for file in files) < 10e6


@pytest.mark.parametrize("split", list(Split))
def test_every_answer_fits_in_a_completion(split: Split, tokenizer: Any) -> None:
    longest = max(len(ids) for ids in tokenizer([row["answer"] for row in shipped(split)])["input_ids"])

    assert longest + 1 <= MAX_NEW_TOKENS  # with the end-of-turn token


def test_every_digit_is_a_token(tokenizer: Any) -> None:
    ids = tokenizer.encode("12+345=357")

    assert [tokenizer.decode([token]) for token in ids] == list("12+345=357")


def test_any_text_survives_the_tokenizer(tokenizer: Any) -> None:
    text = "Zoë's 12 naïve ☃,\n\tand \\boxed{½}"

    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_shipped_tokenizer_is_what_the_tool_trains(tmp_path: Path) -> None:
    make_tokenizer(DATA / "gsm8k_tiny_sft.jsonl").save_pretrained(tmp_path)

    assert (tmp_path / "tokenizer.json").read_bytes() == (MODEL / "tokenizer.json").read_bytes()


def test_a_chat_is_rendered_turn_by_turn_and_ends_with_the_end_of_turn(tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "3+4?"}, {"role": "assistant", "content": "7"}]
    asked = tokenizer.apply_chat_template(chat[:1], tokenize=False, add_generation_prompt=True)
    answered = tokenizer.apply_chat_template(chat, tokenize=False)

    assert asked == "<|im_start|>user\n3+4?<|im_end|>\n<|im_start|>assistant\n"
    assert answered == asked + "7<|im_end|>\n"
    assert tokenizer.eos_token == "<|im_end|>"
