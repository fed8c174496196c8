"""A version is judged against the one that has the tag, from what each row got, and promoted once."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from areal_async.config.settings import Settings
from areal_async.errors import UserError
from areal_async.process.atomic_folders import LEDGER
from areal_async.protocol.types import Version
from areal_async.versions import evaluations, gate, tags
from areal_async.versions.comparison import read_answers, read_result
from areal_async.versions.evaluations import Answer
from areal_async.versions.gate import Verdict, evaluation_of
from areal_async.versions.tags import Tag


class Run:
    """A run whose checkpoints are every 10 steps, of 40."""

    def __init__(self, path: Path) -> None:
        self.path = path / "sums"

    def settings(self, **gate: Any) -> Settings:
        return Settings.model_validate(
            {
                "run": {"name": "sums", "directory": str(self.path.parent), "steps": 40},
                "trainer": {"checkpoint_every_steps": 10},
                "eval": {"every_steps": 10, "dataset": {"path": "held-out"}, "samples": 2},
                "tasks": [{"workflow": "w.py", "dataset": {"path": "rows"}}],
                "gate": {"action": "promote", **gate},
            }
        )

    def has(self, *versions: str) -> None:
        for version in versions:
            (self.path / "checkpoints" / version).mkdir(parents=True)
            (self.path / "checkpoints" / version / LEDGER).touch()

    def trained(self, *versions: str) -> None:
        lines = [f'{{"step": {Version.parse(one).step}, "weights_version": "{one}"}}\n' for one in versions]
        (self.path / "metrics.jsonl").write_text("".join(lines))

    def evaluated(self, version: str, *rows: Sequence[float | None]) -> None:
        answers = [
            Answer(task="w", row=row, sample=sample, reward=reward, error="" if reward is not None else "broke")
            for row, rewards in enumerate(rows)
            for sample, reward in enumerate(rewards)
        ]
        evaluations.write(self.path, Version.parse(version), answers)

    def judge(self, version: str, **gate_: Any) -> Verdict | None:
        return gate.judge(self.path, self.settings(**gate_), Version.parse(version))

    def promote(self, verdict: Verdict | None) -> Tag | None:
        assert verdict is not None
        return gate.promote(self.path, self.settings().gate, verdict)

    @property
    def champions(self) -> list[str]:
        return [line.version for line in tags.history(self.path)]


WRONG, RIGHT, HALF = (0.0, 0.0), (1.0, 1.0), (0.0, 1.0)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run(tmp_path)
    made.has("1-10", "1-20")
    made.trained("1-10", "1-20")
    made.evaluated("1-10", *[HALF] * 20)
    return made


def test_the_first_that_is_evaluated_gets_the_tag_and_no_other_first(run: Run) -> None:
    verdict = run.judge("1-10")
    assert run.promote(verdict) == tags.read(run.path)["champion"]
    assert (tags.read(run.path)["champion"].by, tags.read(run.path)["champion"].comparison) == ("gate", "")

    assert run.judge("1-10") is None, "it is the champion"
    tags.write(run.path, Tag(tag="champion", version=""))
    assert run.judge("1-20") is None, "somebody has taken the tag away"


def test_a_better_version_is_promoted_once_with_the_comparison_behind_it(run: Run) -> None:
    run.promote(run.judge("1-10"))
    run.evaluated("1-20", *[RIGHT] * 20)

    verdict = run.judge("1-20")
    tag = run.promote(verdict)

    assert tag is not None
    assert verdict is not None
    assert (tag.version, tag.was, tag.by, tag.comparison) == ("1-20", "1-10", "gate", "gate_1-10_1-20")
    assert tag.why == "accuracy +0.500 against champion 1-10 (95 % interval +0.500 to +0.500, 20 rows)"
    made = read_result(run.path / "comparisons" / tag.comparison)
    assert (made.a.version, made.b.version, made.by, made.num_samples, made.rows) == (
        "1-10",
        "1-20",
        "gate",
        2,
        {"w": 20},
    )
    assert made.overall is not None
    assert (made.overall.wins, made.overall.a.accuracy, made.overall.b.pass_at) == (20, 0.5, {"1": 1.0, "2": 1.0})
    assert len(read_answers(run.path / "comparisons" / tag.comparison)) == 80
    text = (run.path / "comparisons" / tag.comparison / "comparison.md").read_text()
    assert "| w | +0.500, +0.500 to +0.500 | 20 | 20 | 0 | 0 | 0 |" in text
    tags.write(run.path, Tag(tag="champion", version="1-10", by="ada"))
    assert run.promote(verdict) is None, "a person has taken it back"
    assert run.champions == ["1-10", "1-20", "1-10"]


def test_a_worse_version_is_not_and_a_doubtful_one_neither(run: Run) -> None:
    run.promote(run.judge("1-10"))
    run.evaluated("1-20", *[WRONG] * 20)
    worse = run.judge("1-20")
    run.has("1-30", "1-40")
    run.evaluated("1-30", *[RIGHT] * 11, *[WRONG] * 9)
    run.evaluated("1-40", *[RIGHT] * 9, *[WRONG] * 11)

    assert worse is not None
    assert (worse.is_better, worse.is_worse) == (False, True)
    for doubtful in (run.judge("1-30"), run.judge("1-40")):
        assert doubtful is not None
        assert (doubtful.is_better, doubtful.is_worse) == (False, False)


def test_how_much_better_and_how_sure_is_for_the_settings_to_say(run: Run) -> None:
    run.promote(run.judge("1-10"))
    run.evaluated("1-20", *[RIGHT] * 14, *[WRONG] * 6)
    first = run.judge("1-20", at_least=0.1)
    (run.path / "comparisons" / "gate_1-10_1-20" / "comparison.json").unlink()
    surer = run.judge("1-20", alpha=0.5)

    assert first is not None
    assert surer is not None
    assert (first.is_better, surer.is_better) == (False, True)
    assert "(50 % interval +0.150 to" in surer.sentence


def test_passing_asks_whether_one_of_the_answers_to_a_row_is_right(run: Run) -> None:
    run.promote(run.judge("1-10"))
    run.evaluated("1-20", *[RIGHT] * 18, (0.9, 0.2), (None, None))

    accuracy = run.judge("1-20")
    (run.path / "comparisons" / "gate_1-10_1-20" / "comparison.json").unlink()
    passes = run.judge("1-20", metric="pass")

    assert accuracy is not None
    assert passes is not None
    assert accuracy.difference == pytest.approx((18 * 0.5 + 0.05) / 19)
    assert passes.difference == pytest.approx(-1 / 19), "0.9 is not right"
    assert "pass -0.053 against champion 1-10" in passes.sentence


def test_an_evaluation_speaks_of_the_checkpoint_before_it_which_need_not_be_there_yet(run: Run) -> None:
    spoken_of = {
        version: gate.checkpoint_of(run.path, run.settings(), Version.parse(version))
        for version in ("1-0", "1-9", "1-10", "1-12", "1-29", "1-31", "1-40", "2-20")
    }

    assert {name: str(one) for name, one in spoken_of.items()} == {
        "1-0": "None", "1-9": "None", "1-10": "1-10", "1-12": "1-10", "1-29": "1-20", "1-31": "1-30", "1-40": "1-40",
        "2-20": "1-20",
    }  # fmt: skip


def test_an_evaluation_never_speaks_of_a_checkpoint_that_was_given_up(run: Run) -> None:
    run.has("2-10")
    run.trained("1-10", "2-20")

    spoken = [gate.checkpoint_of(run.path, run.settings(), Version.parse(one)) for one in ("2-20", "2-21", "2-31")]

    assert spoken == [Version(2, 20), Version(2, 20), Version(2, 30)], "1-20 is on disk, and other weights"
    run.has("2-20")
    assert gate.checkpoint_of(run.path, run.settings(), Version(1, 22)) == Version(1, 20), "nor of a later lineage's"


def test_what_the_champion_got_is_found_where_its_evaluation_began_later(run: Run) -> None:
    for version in ("1-0", "1-12", "1-19", "2-21"):
        run.evaluated(version)
    (run.path / "evaluations" / "1-10.jsonl").unlink()

    found = [evaluation_of(run.path, run.settings(), Version(1, step)) for step in (5, 10, 20, 30)]

    assert found == [None, Version(1, 12), Version(2, 21), None]


def test_a_champion_that_was_not_evaluated_or_has_too_few_rows_is_said_to_be(run: Run) -> None:
    tags.write(run.path, Tag(tag="champion", version="1-20"))
    run.has("1-30")
    run.evaluated("1-30", RIGHT)
    with pytest.raises(UserError, match="1-20, which is champion, was not evaluated by this run"):
        run.judge("1-30")
    run.evaluated("1-20", HALF, HALF)

    with pytest.raises(UserError, match="comparison gate_1-20_1-30: 1-30 and 1-20 have fewer than two rows in common"):
        run.judge("1-30")


def test_a_version_whose_checkpoint_is_gone_or_whose_tag_has_moved_is_not_promoted(run: Run) -> None:
    run.promote(run.judge("1-10"))
    run.evaluated("1-20", *[RIGHT] * 20)
    verdict = run.judge("1-20")
    (run.path / "checkpoints" / "1-20" / LEDGER).unlink()
    assert run.promote(verdict) is None
    (run.path / "checkpoints" / "1-20" / LEDGER).touch()
    tags.write(run.path, Tag(tag="champion", version="1-7", by="ada"))

    assert run.promote(verdict) is None

    assert run.champions == ["1-10", "1-7"]
    assert gate.is_judged(run.path, run.settings(), Version(1, 20))


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"gate": {"action": "promote"}}, "gate.action: got promote with eval.every_steps=20 and no held-out data set"),
        (
            {"gate": {"action": "alarm"}, "eval": {"every_steps": 0, "dataset": {"path": "x"}}},
            "eval.every_steps=0 and a",
        ),
        ({"gate": {"against": "best"}}, "got 'best', need a tag"),
        ({"gate": {"against": "1-20"}}, "got '1-20', need a tag"),
        ({"gate": {"metric": "pass"}}, "gate.metric: got pass with eval.samples=1"),
        ({"gate": {"alpha": 0}}, "greater than 0"),
    ],
)
def test_a_gate_that_could_not_work_is_refused(given: dict[str, Any], sentence: str) -> None:
    held_out = {"tasks": [{"workflow": "w.py", "dataset": {"path": "rows"}}]}

    with pytest.raises(ValueError, match=sentence):
        Settings.model_validate({**held_out, **given})
