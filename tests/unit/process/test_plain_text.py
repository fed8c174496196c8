"""What others write is seen in logs and on terminals, and acts on neither; a file that is taken away is made again."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from areal_async.process.plain_text import PlainStream, escaped, read_tail

PRINTS = """
import sys
from areal_async.process.plain_text import keep_output_plain
keep_output_plain()
print("red \\x1b[31m, title \\x1b]0;x\\x07, C1 \\x9b2J, half \\ud800")
print("{question}", end="", flush=True)
sys.__stdin__.readline()
print("after")
raise SystemExit("the end \\x1b[2J")
"""


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("\x1b[2J\x07\x7f", r"\x1b[2J\x07\u007f"),
        ("\x9b2J \u202etxt.exe \u2028", r"\u009b2J \u202etxt.exe \u2028"),
        ("over\rwritten", r"over\x0dwritten"),
        ("a line\r\n\tand its end\n", "a line\r\n\tand its end\n"),
        ("half \ud800", r"half \ud800"),
        ("Größe 大小 \N{GRINNING FACE}", "Größe 大小 \N{GRINNING FACE}"),
    ],
)
def test_what_would_act_on_a_terminal_is_seen(text: str, seen: str) -> None:
    assert escaped(text) == seen


def test_json_stays_the_same_json() -> None:
    value = {"text": "".join(map(chr, range(0x2100)))}

    line = escaped(json.dumps(value, ensure_ascii=False))

    assert json.loads(line) == value
    assert escaped(line) == line


def test_a_process_prints_plainly_into_a_file_that_is_there(tmp_path: Path) -> None:
    """Also what ends it, and after its folder was taken away under it."""
    output = tmp_path / "logs" / "node-0.out"
    output.parent.mkdir()
    with open(output, "ab") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", PRINTS.replace("{question}", "?\\n")],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=file,
        )
    while not (before := read_tail(output, start_bytes=0, max_bytes=1000)).endswith("?\n"):
        assert process.poll() is None, before
    shutil.rmtree(output.parent)
    process.communicate(b"\n", timeout=60)

    assert before == "red \\x1b[31m, title \\x1b]0;x\\x07, C1 \\u009b2J, half \\ud800\n?\n"
    assert output.read_text() == "after\nthe end \\x1b[2J\n"


def test_nobody_fails_who_prints_onto_a_full_disk() -> None:
    number = os.open("/dev/full", os.O_WRONLY)
    stream = PlainStream(number, Path("/dev/full"))

    print("lost", file=stream, flush=True)
    with pytest.raises(OSError, match="No space left"):
        os.write(number, b"so it is full")
    stream.close()
    os.close(number)


def test_the_tail_of_a_file_that_was_made_again_is_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("new")

    assert read_tail(path, start_bytes=0, max_bytes=2) == "ew"
    assert read_tail(path, start_bytes=3, max_bytes=100) == ""
    assert read_tail(path, start_bytes=5000, max_bytes=100) == "new"
    assert read_tail(tmp_path / "gone", start_bytes=5000, max_bytes=100) == ""
