"""Rewards for test_rewards: each misbehaves in its own way."""

import math
import os
import subprocess
import sys
import time

from areal_async import reward


@reward
def length_of(text: str) -> int:
    return len(text)


@reward(timeout_s=30)
def is_longer(text: str, *, than: list[str]) -> bool:
    return all(len(text) > len(other) for other in than)


@reward(timeout_s=1.0)
def hang(pid_file: str) -> float:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    with open(pid_file, "w") as file:
        file.write(f"{os.getpid()} {child.pid}")
    time.sleep(600)
    return 1.0


def slow_start() -> None:
    time.sleep(1.5)
    PREPARED.append(os.getpid())


PREPARED: list[int] = []


@reward(timeout_s=1.0, prepare=slow_start)
def times_prepared() -> int:
    return len(PREPARED)


def cannot_start() -> None:
    raise ImportError("no such module")


@reward(prepare=cannot_start)
def unprepared() -> float:
    return 1.0


@reward
def fail(text: str) -> float:
    raise ValueError(f"cannot read {text}")


@reward
def nothing() -> None:
    return None


@reward
def not_a_number() -> float:
    return math.nan


@reward
def text_instead(text: str) -> str:
    return text


@reward
def die() -> float:
    os._exit(7)


@reward
def noisy() -> float:
    print("a reward may print", flush=True)
    sys.stdin.read()
    return 0.5


@reward
def has_torch() -> bool:
    return "torch" in sys.modules or "transformers" in sys.modules


@reward
def process_id() -> int:
    return os.getpid()
