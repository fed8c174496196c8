"""What is recorded is bounded, survives a crash but for a line, and is a table for whoever trains or compares."""

from pathlib import Path
from typing import IO, Any

import datasets
import pytest

from areal_async.config.settings import ServeSettings
from areal_async.errors import UserError
from areal_async.process.file_locks import try_lock
from areal_async.serving import records
from areal_async.serving.export import export, pairs_of, read_answers
from areal_async.serving.records import ANSWERS, FEEDBACK, Answer, FeedbackLine, LineFiles, Recorder, files_of
from tests.brokers import until
from tests.documents import blocks_of

pytestmark = pytest.mark.anyio


def answer(id: str = "msg_1", **fields: Any) -> Answer:
    usual: dict[str, Any] = {
        "choice": 0, "at": "2026-01-01T00:00:00.000+00:00", "api": "a", "key": "ann", "arm": "champion",
        "version": "1-2", "assigned": "share", "session": "", "prompt": "p",
        "messages": [{"role": "user", "content": "2 and 3?"}], "tools": "", "completion": "5", "tool_calls": "",
        "finish_reason": "stop", "num_prompt_tokens": 3, "num_tokens": 2, "temperature": 1.0, "duration_s": 0.1,
        "prompt_ids": [1, 2, 3], "token_ids": [4, 5], "logprobs": [-0.5, -0.25],
    }  # fmt: skip
    return Answer(id=id, **usual | fields)


def feedback(id: str = "msg_1", at: int = 0, **said: Any) -> FeedbackLine:
    usual: dict[str, Any] = {"key": "ann", "choice": 0, "reward": None, "rating": None, "comment": None}
    return FeedbackLine(id=id, at=f"2026-01-01T00:00:0{at}", **usual | said)


async def record(directory: Path, *lines: Answer | FeedbackLine, **settings: Any) -> Recorder:
    async with Recorder(directory, ServeSettings.model_validate(settings)) as recorder:
        for line in lines:
            recorder.note(ANSWERS if isinstance(line, Answer) else FEEDBACK, line)
    return recorder


async def test_every_line_is_written_when_the_end_comes_at_once(tmp_path: Path) -> None:
    recorder = await record(tmp_path, *(answer(f"msg_{number}") for number in range(50)), feedback())

    assert [row["id"] for row in read_answers(tmp_path)] == [f"msg_{number}" for number in range(50)]
    assert recorder.num_left_out == 0
    (path,) = files_of(tmp_path, ANSWERS)
    assert path.stat().st_mode & 0o777 == 0o600


def test_files_follow_each_other_and_the_oldest_go(tmp_path: Path) -> None:
    files = LineFiles(tmp_path, ANSWERS, file_bytes=100, max_bytes=350)
    line = b"x" * 49 + b"\n"

    for number in range(40):
        files.write([line, b"%04d" % number + line[4:]])
        left = files_of(tmp_path, ANSWERS)
        assert sum(path.stat().st_size for path in left) <= 350
        assert all(path.stat().st_size <= 100 for path in left)
    files.close()

    assert [path.read_bytes()[50:54] for path in files_of(tmp_path, ANSWERS)] == [b"0037", b"0038", b"0039"]


def test_a_file_that_another_process_writes_is_left(tmp_path: Path) -> None:
    old = tmp_path / "answers-20200101T000000.000000Z-000000.jsonl"
    old.write_bytes(b"x" * 300)
    with old.open("rb") as file:
        assert try_lock(file)
        files = LineFiles(tmp_path, ANSWERS, file_bytes=100, max_bytes=200)
        files.write([b"y" * 100, b"y" * 100])
        assert old.exists()
    files.write([b"y" * 100])
    files.close()

    assert not old.exists()


def test_a_file_that_grows_is_left_by_other_processes(tmp_path: Path) -> None:
    grows, other = (LineFiles(tmp_path, ANSWERS, file_bytes=100, max_bytes=100) for _ in range(2))
    grows.write([b"x" * 60])
    other.write([b"y" * 60, b"z" * 60])
    grows.write([b"x" * 40])
    for files in (grows, other):
        files.close()

    assert sorted(path.read_bytes()[:1] for path in files_of(tmp_path, ANSWERS)) == [b"x", b"z"]


def test_a_file_that_another_process_takes_for_an_old_one_is_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has been made and is not locked yet."""
    files, others = LineFiles(tmp_path, ANSWERS, file_bytes=100, max_bytes=200), []

    def try_later(file: IO[bytes]) -> bool:
        if not others:
            (path,) = files_of(tmp_path, ANSWERS)
            others.append(path.open("rb"))
            assert try_lock(others[0])
            path.unlink()
        return try_lock(file)

    monkeypatch.setattr(records, "try_lock", try_later)
    files.write([b"x\n"])
    files.close()
    others[0].close()

    assert [path.read_bytes() for path in files_of(tmp_path, ANSWERS)] == [b"x\n"]


def test_after_a_full_disk_lines_begin_another_file(tmp_path: Path) -> None:
    files = LineFiles(tmp_path, ANSWERS, file_bytes=100, max_bytes=1000)
    files._file = open("/dev/full", "wb")
    with pytest.raises(OSError, match="No space left"):
        files.write([b"x\n"])

    files.write([b"y\n"])
    files.close()

    assert [path.read_bytes() for path in files_of(tmp_path, ANSWERS)] == [b"y\n"]


async def test_what_cannot_be_written_is_counted_and_the_next_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MAX_LINE_BYTES", 5000)
    (tmp_path / "served").write_text("in the way")
    async with Recorder(tmp_path / "served", ServeSettings()) as recorder:
        recorder.note(ANSWERS, answer("msg_1", completion="x" * 5000))
        recorder.note(ANSWERS, answer("msg_2"))
        await until(lambda: recorder.num_left_out == 2)
        (tmp_path / "served").unlink()
        recorder.note(ANSWERS, answer("msg_3"))

    assert [row["id"] for row in read_answers(tmp_path / "served")] == ["msg_3"]
    assert recorder.num_left_out == 2


async def test_a_disk_that_is_slow_holds_no_more_than_there_is_room_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "MAX_PENDING_BYTES", 2000)

    recorder = await record(tmp_path, *(answer(f"msg_{number}") for number in range(50)))

    written = len(list(read_answers(tmp_path)))
    assert 0 < written < 10
    assert recorder.num_left_out == 50 - written


async def test_a_line_that_a_crash_has_cut_is_left_out(tmp_path: Path) -> None:
    await record(tmp_path, answer("msg_1"), answer("msg_2"))
    (path,) = files_of(tmp_path, ANSWERS)
    path.write_bytes(path.read_bytes()[:-20])
    await record(tmp_path, answer("msg_3"))

    assert [row["id"] for row in read_answers(tmp_path)] == ["msg_1", "msg_3"]


async def test_damaged_lines_are_counted_and_the_rest_is_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long one is: it is not read at once."""
    monkeypatch.setattr(records, "MAX_LINE_BYTES", 2000)
    await record(tmp_path, answer("msg_1"), answer("msg_2"), feedback("msg_2", reward=0.5))
    (path,) = files_of(tmp_path, ANSWERS)
    first, second = path.read_bytes().splitlines()
    damaged = [b"\0" * 30, b"[" * 1500, b"x" * 9000, b'{"id": 1}', b"", first.replace(b"1-2", b"\xff")]
    path.write_bytes(b"\n".join([first, *damaged, second, b"x" * 9000]))
    (said,) = files_of(tmp_path, FEEDBACK)
    said.write_bytes(b"{}\n" + said.read_bytes())

    num_rows, num_damaged = export(tmp_path, tmp_path / "all.jsonl", form="answers")

    assert (num_rows, num_damaged) == (2, {path: len(damaged) + 1, said: 1})
    assert [(row["id"], row["reward"]) for row in read_answers(tmp_path)] == [("msg_1", None), ("msg_2", 0.5)]


async def test_the_newest_word_of_each_kind_counts(tmp_path: Path) -> None:
    await record(
        tmp_path,
        answer("msg_1"),
        answer("msg_1", choice=1),
        answer("msg_2"),
        answer("msg_3"),
        feedback("msg_1", 3, reward=0.5),
        feedback("msg_1", 2, reward=-1.0, comment="no"),
        feedback("msg_1", 4, rating=1),
        feedback("msg_1", choice=1, rating=4),
        feedback("msg_2", comment="well"),
        feedback("msg_9", reward=1.0),
        feedback("msg_3", reward=9.0, key="ben"),
    )

    rows = [(row["id"], row["choice"], row["reward"], row["rating"], row["comment"]) for row in read_answers(tmp_path)]
    assert rows == [
        ("msg_1", 0, 0.5, 1, "no"),
        ("msg_1", 1, 0.75, 4, None),
        ("msg_2", 0, None, None, "well"),
        ("msg_3", 0, None, None, None),
    ]


async def test_pairs_are_the_best_and_the_worst_of_a_conversation(tmp_path: Path) -> None:
    await record(
        tmp_path,
        *(answer(f"msg_{number}", completion=str(number), version=f"1-{number}") for number in range(4)),
        answer("msg_4", prompt="alone"),
        answer("msg_7", tool_calls="[]"),
        feedback("msg_7", reward=5.0),
        *(answer(f"msg_{number}", prompt="alike") for number in (5, 6)),
        *(feedback(f"msg_{number}", reward=reward) for number, reward in enumerate([0.5, 1.0, 0.0])),
        *(feedback(f"msg_{number}", reward=1.0) for number in (4, 5, 6)),
    )

    (pair,) = pairs_of(read_answers(tmp_path))

    assert pair == {
        "question": [{"role": "user", "content": "2 and 3?"}], "chosen": "1", "rejected": "2",
        "id_chosen": "msg_1", "version_chosen": "1-1", "reward_chosen": 1.0,
        "id_rejected": "msg_2", "version_rejected": "1-2", "reward_rejected": 0.0,
    }  # fmt: skip


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
async def test_tables_are_loaded_by_datasets_with_columns_for_training_and_comparing(
    suffix: str, tmp_path: Path
) -> None:
    called = {"role": "assistant", "content": "", "tool_calls": "[]"}
    await record(
        tmp_path / "served",
        answer("msg_1"),
        answer("msg_2", messages=[called, {"role": "tool", "content": "5", "tool_call_id": "c"}], completion="6"),
        answer("msg_3", temperature=None, logprobs=[]),
        feedback("msg_1", reward=1),
        feedback("msg_3", rating=1),
    )
    kind = {".jsonl": "json", ".parquet": "parquet"}[suffix]

    loaded = {}
    for form in ("answers", "pairs"):
        path = tmp_path / f"{form}{suffix}"
        assert export(tmp_path / "served", path, form=form) == ({"answers": 3, "pairs": 1}[form], {})
        loaded[form] = datasets.load_dataset(kind, data_files=str(path), split="train", cache_dir=str(tmp_path))

    assert loaded["answers"]["reward"] == [1.0, None, 0.0]
    assert loaded["answers"]["completion"] == ["5", "6", "5"]
    assert loaded["answers"][0]["messages"][0]["content"] == "2 and 3?"
    assert {"messages", "completion", "version", "arm", "reward", "num_tokens", "token_ids", "logprobs"} <= set(
        loaded["answers"].column_names
    )
    assert loaded["pairs"]["chosen"] == ["5"]
    raw = datasets.load_dataset(
        "json", data_files=str(tmp_path / "served" / "answers-*.jsonl"), split="train", cache_dir=str(tmp_path)
    )
    assert len(raw) == 3, "the files as they are written, too"


def test_an_export_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"need a name that ends in \.jsonl or \.parquet"):
        export(tmp_path, tmp_path / "a.csv", form="answers")
    with pytest.raises(UserError, match="has no answers; serve some first"):
        export(tmp_path, tmp_path / "a.jsonl", form="answers")


async def test_arms_are_compared_as_the_document_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arms = {"champion": 0.0, "candidate": 1.0}
    asked = [(arm, row) for arm in arms for row in range(3)] + [("champion", 9)]
    await record(
        tmp_path / "served",
        *(answer(f"{arm}{row}", arm=arm, prompt=str(row)) for arm, row in asked),
        *(feedback(f"{arm}{row}", reward=arms[arm]) for arm, row in asked),
    )
    export(tmp_path / "served", tmp_path / "answers.jsonl", form="answers")
    (block,) = (one for one in blocks_of("areal_async/serving/README.md") if "statistics import compare" in one.body)
    monkeypatch.chdir(tmp_path)

    exec(block.body, {})

    assert "num_rows=3, num_left_out=1, first=0.0, second=1.0, difference=1.0" in capsys.readouterr().out
