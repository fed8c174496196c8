"""Supervised fine-tuning learns the answer and the end of the turn, and nothing of the prompt."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from areal_async.config.sft import SftSettings
from areal_async.errors import UserError
from areal_async.trainer.tuning import loop, sft
from tests.unit.trainer.rank_workers import ROOT

TINY = ROOT / "configs" / "models" / "tiny"
ROWS = [{"question": f"What is {n}+1?", "answer": f"{n}+1={n + 1}\n#### {n + 1}"} for n in range(40)]


@pytest.fixture
def settings(tmp_path: Path) -> SftSettings:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return SftSettings.model_validate(
        {
            "run": {"name": "test", "directory": tmp_path / "runs", "steps": 8, "log_every_steps": 4},
            "model": {"path": str(TINY), "dtype": "float32"},
            "dataset": {"path": str(tmp_path / "rows.jsonl")},
            "trainer": {"lr": 1e-3, "batch_sequences": 16, "schedule": "constant"},
            "eval": {"limit": 8},
        }
    )


def changed(settings: SftSettings, **sections: dict[str, Any]) -> SftSettings:
    dumped = settings.model_dump()
    return SftSettings.model_validate({name: value | sections.get(name, {}) for name, value in dumped.items()})


def test_fine_tuning_lowers_the_loss_and_leaves_metrics_and_a_model(
    settings: SftSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    sft.run_sft(settings)

    lines = [json.loads(line) for line in (settings.run_directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7, 8, 8]
    assert lines[7]["loss"] < lines[0]["loss"]
    assert lines[8]["held_out_rows"] == 8
    assert 0 < lines[8]["held_out_loss"] < lines[0]["loss"]
    assert (settings.run_directory / "model" / "tokenizer.json").read_bytes() == (TINY / "tokenizer.json").read_bytes()
    assert (settings.run_directory / "config.yaml").is_file()
    printed = capsys.readouterr().out
    assert "step 4/8" in printed
    assert "step 8/8" in printed
    assert "held-out loss" in printed


def test_adapters_alone_may_be_fine_tuned(settings: SftSettings) -> None:
    sft.run_sft(changed(settings, trainer={"lora": {"rank": 4}}, run={"steps": 2}))

    adapter = load_file(settings.run_directory / "adapter" / "adapter_model.safetensors")
    assert {name.split(".")[-2] for name in adapter} == {"lora_A", "lora_B"}
    model, base = (load_file(one / "model.safetensors") for one in (settings.run_directory / "model", TINY))
    assert torch.equal(model["model.embed_tokens.weight"], base["model.embed_tokens.weight"])
    assert not torch.equal(model["model.layers.0.mlp.down_proj.weight"], base["model.layers.0.mlp.down_proj.weight"])


def test_prompt_is_out_of_the_loss_and_the_end_of_the_turn_is_in_it(settings: SftSettings) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY)

    example = sft.load_examples(settings)[3]

    prompt, answer = example.token_ids[~example.loss_mask], example.token_ids[example.loss_mask]
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": ROWS[3]["question"]}], add_generation_prompt=True, tokenize=False
    )
    assert tokenizer.decode(prompt) == rendered
    assert tokenizer.decode(answer) == ROWS[3]["answer"] + tokenizer.eos_token


def test_batches_go_through_every_row_once_per_epoch_in_an_order_of_the_seed() -> None:
    def batches(seed: int) -> list[int]:
        return np.concatenate(list(islice(loop.endless_batches(np.arange(10), size=4, seed=seed), 5))).tolist()

    assert sorted(batches(1)[:10]) == sorted(batches(1)[10:]) == list(range(10))
    assert batches(1) == batches(1) != batches(2)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"path": "/nowhere/model"}}, r"model: got /nowhere/model, which is no folder; set model.path"),
        ({"dataset": {"path": "nowhere.jsonl"}}, r"dataset: file nowhere.jsonl is not there"),
        ({"dataset": {"answer": "solution"}}, r"has columns \['question', 'answer'\], need 'solution'"),
        ({"eval": {"limit": 40}}, r"got 40 rows with eval.limit=40, need more"),
        ({"trainer": {"token_budget": 16}}, r"need at most trainer.token_budget=16"),
    ],
)
def test_a_mistake_is_told_in_one_sentence(
    sections: dict[str, dict[str, Any]], message: str, settings: SftSettings
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        sft.run_sft(changed(settings, **sections))

    assert "\n" not in str(caught.value)


def test_a_data_set_without_rows_is_refused(tmp_path: Path, settings: SftSettings) -> None:
    (tmp_path / "empty.csv").write_text("question,answer\n")

    with pytest.raises(UserError, match="dataset: .*empty.csv has no rows, need at least one"):
        sft.run_sft(changed(settings, dataset={"path": str(tmp_path / "empty.csv")}))


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([*ROWS[:2], {"question": None, "answer": "4"}], "row 2: question is null, need text or messages"),
        ([*ROWS[:2], {"question": "2+2?", "answer": None}], "row 2: answer is null, need text"),
        ([{"question": "2+2?", "answer": 4}], "row 0: answer is int 4, need text"),
        ([{"question": [], "answer": "4"}], r"row 0: question is list \[\], need text or messages"),
        (
            [{"question": [{"role": "user", "content": None}], "answer": "4"}],
            r"row 0: question is list \[\{'role': 'user', 'content': None\}\], need text or messages",
        ),
    ],
)
def test_a_cell_that_cannot_be_learned_is_told_by_its_row(
    rows: list[dict[str, Any]], sentence: str, settings: SftSettings, tmp_path: Path
) -> None:
    (tmp_path / "odd.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    with pytest.raises(UserError, match=f"^dataset: .*odd.jsonl {sentence}$"):
        sft.load_examples(changed(settings, dataset={"path": str(tmp_path / "odd.jsonl")}))


def test_a_conversation_that_the_template_refuses_is_told_by_its_row(settings: SftSettings) -> None:
    tokenizer = AutoTokenizer.from_pretrained(TINY)
    tokenizer.chat_template = "{{ raise_exception('no second question') if messages | length > 1 }}x"
    talks = [[{"role": "user", "content": "1+1?"}] * number for number in (1, 2)]

    with pytest.raises(UserError, match=r"rows.jsonl row 1: the model's chat template refuses it: no second question$"):
        loop.Examples(settings, None, tokenizer).encode(talks, for_reply=True)


def test_prompt_may_be_a_conversation_and_only_the_answer_is_learned(settings: SftSettings, tmp_path: Path) -> None:
    chat = [
        {"role": "user", "content": "What is 2+2?"},
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "No."},
    ]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": chat, "answer": "4"}) + "\n")

    dataset = {"path": str(tmp_path / "chats.jsonl"), "question": "messages"}
    (row,) = sft.load_examples(changed(settings, dataset=dataset))

    tokenizer = AutoTokenizer.from_pretrained(TINY)
    assert tokenizer.decode(row.token_ids[row.loss_mask].tolist()) == "4<|im_end|>"
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(row.token_ids[~row.loss_mask].tolist()) == prompt


def test_a_loss_that_is_not_finite_leaves_a_line_of_json(tmp_path: Path) -> None:
    loop._append(tmp_path, {"step": 3, "loss": float("nan"), "grad_norm": 1.0})

    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line, parse_constant=pytest.fail) == {"step": 3, "grad_norm": 1.0, "not_finite": "loss"}
