"""The verb's pairs are the conversations that servers score, some are held out, and what it makes is told and kept."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from areal_async.config.reward_model import RewardModelSettings
from areal_async.errors import UserError
from areal_async.rollout.policy.text import load_codec
from areal_async.trainer.tuning import reward_model
from tests.unit.trainer.rank_workers import ROOT

TINY = ROOT / "configs" / "models" / "tiny"
ROWS = [
    {
        "question": f"What is {n}+1?",
        "chosen": f"{n}+1={n + 1}\n#### {n + 1}",
        "rejected": f"{n}-1={n - 1}\n#### {n - 1}",
    }
    for n in range(40)
]


@pytest.fixture
def settings(tmp_path: Path) -> RewardModelSettings:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return RewardModelSettings.model_validate(
        {
            "run": {"name": "test", "directory": tmp_path / "runs", "steps": 6, "log_every_steps": 3},
            "model": {"path": str(TINY), "dtype": "float32"},
            "dataset": {"path": str(tmp_path / "rows.jsonl")},
            "trainer": {"lr": 1e-3, "batch_pairs": 16, "schedule": "constant"},
            "eval": {"limit": 8},
        }
    )


def changed(settings: RewardModelSettings, **sections: dict[str, Any]) -> RewardModelSettings:
    dumped = settings.model_dump()
    return RewardModelSettings.model_validate({name: value | sections.get(name, {}) for name, value in dumped.items()})


def test_training_tells_held_out_pairs_apart_and_leaves_metrics_and_a_model(
    settings: RewardModelSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    reward_model.run_reward_model(settings)

    lines = [json.loads(line) for line in (settings.run_directory / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 6]
    assert [line["num_pairs"] for line in lines[:6]] == [16] * 6
    assert (lines[6]["held_out_rows"], lines[6]["held_out_accuracy"]) == (8, 1.0), "what is added is not taken away"
    assert 0 < lines[6]["held_out_loss"] < lines[0]["loss"]
    assert (settings.run_directory / "model" / "tokenizer.json").read_bytes() == (TINY / "tokenizer.json").read_bytes()
    assert (settings.run_directory / "config.yaml").is_file()
    printed = capsys.readouterr().out
    assert "step 3/6" in printed
    assert "held-out loss" in printed
    assert "pairs right 1.000 over 8 rows" in printed


def test_pairs_are_the_tokens_that_a_node_has_scored(settings: RewardModelSettings) -> None:
    codec = load_codec(str(TINY))

    pair = reward_model.load_pairs(settings)[3]

    for ids, column in ((pair.chosen, "chosen"), (pair.rejected, "rejected")):
        messages = [
            {"role": "user", "content": ROWS[3]["question"]},
            {"role": "assistant", "content": ROWS[3][column]},
        ]
        assert ids == codec.encode(codec.render(messages, for_reply=False))


def test_columns_may_hold_whole_conversations(settings: RewardModelSettings, tmp_path: Path) -> None:
    chats = {
        side: [{"role": "user", "content": "What is 3+1?"}, {"role": "assistant", "content": ROWS[3][side]}]
        for side in ("chosen", "rejected")
    }
    (tmp_path / "chats.jsonl").write_text(json.dumps(chats) + "\n")

    dataset = {"path": str(tmp_path / "chats.jsonl"), "question": None}
    (pair,) = reward_model.load_pairs(changed(settings, dataset=dataset))

    assert pair == reward_model.load_pairs(settings)[3]
    assert AutoTokenizer.from_pretrained(TINY).decode(pair.chosen).endswith("#### 4<|im_end|>\n")


@pytest.mark.parametrize(
    ("column", "question", "sentence"),
    [
        ("question", "question", "row 2: question is null, need text or messages"),
        ("rejected", "question", "row 2: rejected is null, need text"),
        ("chosen", None, "row 2: chosen is null, need text or messages"),
    ],
)
def test_a_cell_that_cannot_be_learned_is_told_by_its_row(
    column: str, question: str | None, sentence: str, settings: RewardModelSettings, tmp_path: Path
) -> None:
    rows = [*ROWS[:2], ROWS[2] | {column: None}]
    (tmp_path / "odd.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    with pytest.raises(UserError, match=f"^dataset: .*odd.jsonl {sentence}$"):
        reward_model.load_pairs(changed(settings, dataset={"path": str(tmp_path / "odd.jsonl"), "question": question}))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"dataset": {"chosen": "better"}}, r"has columns \['question', 'chosen', 'rejected'\], need 'better'"),
        ({"eval": {"limit": 40}}, r"got 40 rows with eval.limit=40, need more"),
        (
            {"trainer": {"token_budget": 40}},
            r"got a pair of \d+ tokens in row \d+, need at most trainer.token_budget=40",
        ),
    ],
)
def test_a_mistake_is_told_in_one_sentence(
    sections: dict[str, dict[str, Any]], message: str, settings: RewardModelSettings
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        reward_model.run_reward_model(changed(settings, **sections))

    assert "\n" not in str(caught.value)
