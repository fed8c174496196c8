"""``doctor FILE.py`` counts what a workflow asks for on real rows against the context and the token budget."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from areal_async.config.settings import Settings
from areal_async.doctor.preflight.findings import Level, PreflightFinding
from areal_async.doctor.preflight.lengths import MAX_ROWS, Lengths, check_lengths, judge

pytestmark = pytest.mark.anyio

TINY = "configs/models/tiny"
ASK = """
async def ask(prompt, policy):
    print("not for the findings")
    reply = await policy.chat([{"role": "user", "content": prompt["question"]}], max_new_tokens=300)
    return float(len(reply.text))
"""


@pytest.fixture
def anyio_backend() -> Any:
    return "asyncio", {"use_uvloop": True}


def settings_of(folder: Path, text: str, rows: list[Mapping[str, Any]], **given: Any) -> Settings:
    (folder / "ask.py").write_text(text)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"workflow": str(folder / "ask.py"), "dataset": {"path": str(folder / "rows.jsonl")}}
    return Settings.model_validate({"model": {"path": TINY}, "tasks": [task], **given})


async def look(settings: Settings) -> list[PreflightFinding]:
    return await check_lengths(settings, model_context=512)


async def test_prompts_and_answers_are_counted_over_real_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"question": "1 + 1?"}] * 100
    (finding,) = await look(settings_of(tmp_path, ASK, rows))
    assert finding.level is Level.GOOD
    assert finding.saw.startswith(f"{MAX_ROWS} of 100 rows looked at: prompts of ")
    assert "answers of up to 300" in finding.saw
    assert "not for the findings" not in capsys.readouterr().out

    (finding,) = await look(settings_of(tmp_path, ASK, rows, trainer={"token_budget": 200}))
    assert finding.level is Level.WARNING
    assert "trainer.token_budget = 200: the answer is cut there" in finding.saw


async def test_workflow_that_comes_to_no_call_is_told_with_its_reason(tmp_path: Path) -> None:
    (finding,) = await look(settings_of(tmp_path, ASK, [{"answer": "2"}]))
    assert (finding.level, finding.cure) == (Level.WARNING, "look at one with `try`")
    assert "in 1 of them the workflow came to no call of the model: workflow ask: ColumnError: row 0" in finding.saw


def test_what_does_not_fit_is_told_with_numbers_and_cure() -> None:
    def told(*calls: tuple[int, int], context: int = 512, budget: int = 16384) -> list[tuple[Level, str, str]]:
        found = judge("lengths of w", Lengths(num_rows=9, calls=list(calls)), context=context, budget=budget)
        return [(one.level, one.saw.partition("; ")[2] or one.saw.partition(": at")[2], one.cure) for one in found]

    raise_context = "raise inference.context_length, as far as the model goes"
    assert told((250, 260)) == [(Level.GOOD, " most 510 tokens, the context of 512 tokens holds them", "")]
    assert told((250, 300), (10, 300)) == [
        (
            Level.WARNING,
            "1 of these need up to 550 tokens with the context of 512 tokens: the answer is cut there, and counts "
            "in truncated_share",
            f"lower rollout.sampling.max_new_tokens to 260, or {raise_context}",
        )
    ]
    no_room = "leave no room for an answer in the context of 512 tokens, and their trajectories fail"
    shorten = f"shorten the prompts or leave these rows out, or {raise_context}"
    assert told((506, 1), (10, 10)) == [(Level.WARNING, f"1 prompts {no_room}", shorten)]
    assert told((506, 1)) == [(Level.ERROR, f"1 prompts {no_room}", shorten)]
    assert told((505, 5)) == [(Level.GOOD, " most 510 tokens, the context of 512 tokens holds them", "")]
    ((level, saw, cure),) = told((400, 1), budget=400)
    assert (level, cure) == (Level.ERROR, "shorten the prompts or leave these rows out, or raise it")
    assert "trainer.token_budget = 400" in saw


def test_nothing_is_said_of_lengths_that_nobody_asked_for() -> None:
    reasons = Counter({"it returned without a call": 2, "too dear": 1})
    (finding,) = judge("lengths of w", Lengths(num_rows=3, reasons=reasons), context=512, budget=100)
    assert finding.saw.endswith("no call of the model: it returned without a call (1 for other reasons)")
