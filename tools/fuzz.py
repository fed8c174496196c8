"""Damaged messages for every decoder of bytes that another process wrote (``tools/decoders.py``).

    python -m tools.fuzz --inputs 1000000 [--decoder NAME ...] [--seed N] [--first INDEX]

Each input must end in a value or in the decoder's own error, within a second and without the process growing. Whatever
else happens is a finding: it is printed with its index, and ``--decoder NAME --first INDEX --inputs 1`` shows it again.
Exits with 1 when there are findings.
"""

import argparse
import gc
import resource
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random
from types import FrameType

from tools.decoders import DECODERS, Decoder
from tools.mutations import mutated

DEADLINE_S = 1.0
"""Limit of the process's own time for one input, in seconds: other processes may be busy."""
MAX_GROWTH_BYTES = 64 << 20
MAX_FINDINGS = 5
"""Most failures reported of one decoder."""
SETTLE_INPUTS = 1000
"""Inputs after which the process has its size; growth from then on is counted."""
TITLES = ("inputs", "accepted", "refused", "inputs/s", "growth MB", "findings")


class InputTimeoutError(Exception):
    """An input took longer than ``DEADLINE_S``."""


@dataclass(slots=True)
class Score:
    """The outcomes of one decoder's inputs."""

    num_inputs: int = 0
    num_accepted: int = 0
    num_refused: int = 0
    decode_s: float = 0.0
    """Processor time in the decoder alone, in seconds."""
    growth_bytes: int = 0
    """Growth of the process's largest resident size from ``SETTLE_INPUTS`` inputs on."""
    findings: list[str] = field(default_factory=list)


def input_of(decoder: Decoder, *, seed: int, index: int) -> bytes:
    """Return one input; the same for the same numbers. The first ones are the valid messages themselves."""
    if index < len(decoder.corpus):
        return decoder.corpus[index]
    return mutated(Random(f"{seed}.{decoder.name}.{index}"), decoder.corpus)


def fuzz(decoder: Decoder, *, seed: int, first: int, count: int) -> Score:
    """Give one decoder ``count`` inputs, from index ``first`` on."""
    score = Score()
    size_bytes = settled_bytes = peak_bytes()
    with _alarm() as alarm:
        for index in range(first, first + count):
            if len(score.findings) == MAX_FINDINGS:
                break
            data = input_of(decoder, seed=seed, index=index)
            before_bytes = peak_bytes()
            _try(decoder, data, index, score, alarm)
            size_bytes = peak_bytes()
            if size_bytes - before_bytes > MAX_GROWTH_BYTES:
                _note(score, index, data, f"grew by {(size_bytes - before_bytes) >> 20} MB")
            if score.num_inputs == SETTLE_INPUTS:
                settled_bytes = size_bytes
    score.growth_bytes = size_bytes - settled_bytes
    return score


def peak_bytes() -> int:
    """Return the largest resident size that this process ever had."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@dataclass(slots=True)
class _Alarm:
    """Whether an input is being decoded: the signal of a timer may arrive after the timer was stopped."""

    is_set: bool = False


def _try(decoder: Decoder, data: bytes, index: int, score: Score, alarm: _Alarm) -> None:
    score.num_inputs += 1
    started = time.thread_time()  # the process's clock is coarse while a timer runs on it
    alarm.is_set = True
    signal.setitimer(signal.ITIMER_PROF, DEADLINE_S)
    try:
        try:
            decoder.decode(data)
        finally:
            alarm.is_set = False
            signal.setitimer(signal.ITIMER_PROF, 0)
        score.num_accepted += 1
    except decoder.refuses:
        score.num_refused += 1
    except InputTimeoutError:
        _note(score, index, data, f"took more than {DEADLINE_S:g} s")
    except Exception:  # noqa: BLE001 - whatever else a decoder raises is what is looked for
        _note(score, index, data, traceback.format_exc(limit=-3).strip())
    score.decode_s += time.thread_time() - started


def _note(score: Score, index: int, data: bytes, what: str) -> None:
    score.findings.append(f"input {index}, {len(data)} bytes {data[:120]!r}: {what}")


@contextmanager
def _alarm() -> Iterator[_Alarm]:
    alarm = _Alarm()

    def ring(_: int, __: FrameType | None) -> None:
        if alarm.is_set:
            raise InputTimeoutError

    before = signal.signal(signal.SIGPROF, ring)
    try:
        yield alarm
    finally:
        signal.signal(signal.SIGPROF, before)


def main() -> None:
    """Run the table and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=10_000, help="for each decoder")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="index of the first input")
    parser.add_argument("--decoder", choices=[one.name for one in DECODERS], nargs="+", help="these alone")
    arguments = parser.parse_args()
    num_findings = 0
    print(
        f"{'decoder':20}{'inputs':>10}{'accepted':>10}{'refused':>10}{'inputs/s':>10}{'growth MB':>11}{'findings':>10}"
    )
    for decoder in DECODERS:
        if arguments.decoder and decoder.name not in arguments.decoder:
            continue
        gc.collect()
        score = fuzz(decoder, seed=arguments.seed, first=arguments.first, count=arguments.inputs)
        num_findings += len(score.findings)
        rate = score.num_inputs / max(score.decode_s, 1e-9)
        print(
            f"{decoder.name:20}{score.num_inputs:10}{score.num_accepted:10}{score.num_refused:10}{rate:10.0f}"
            f"{score.growth_bytes / 2**20:10.1f}{len(score.findings):10}",
            flush=True,
        )
        for finding in score.findings:
            print(f"    {finding}", flush=True)
    sys.exit(1 if num_findings else 0)


if __name__ == "__main__":
    main()
