"""Rewards for test_rewards: each misbehaves in its own way."""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from areal_async import Reject, reward
from areal_async.errors import RewardError


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


def start_daemon(pid_file: str) -> None:
    """Start a process as daemons are: in a session of its own, the child of nobody."""
    if child := os.fork():
        os.waitpid(child, 0)
        return
    os.setsid()
    if os.fork():
        os._exit(0)
    for number in range(3):
        os.dup2(os.open(os.devnull, os.O_RDWR), number)
    with open(pid_file + ".new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(pid_file + ".new", pid_file)
    time.sleep(60)
    os._exit(0)


@reward(timeout_s=3.0)
def leave_daemon(pid_file: str, then: str) -> float:
    if then == "keep":
        child = subprocess.Popen(["sleep", "60"], start_new_session=True)
        KEPT.append(child)
        with open(pid_file, "w") as file:
            file.write(str(child.pid))
        return 1.0
    start_daemon(pid_file)
    while not os.path.exists(pid_file):
        time.sleep(0.01)
    match then:
        case "raise":
            raise ValueError("left a daemon")
        case "hang":
            time.sleep(600)
        case "die":
            os._exit(7)
    return 1.0


KEPT: list["subprocess.Popen[bytes]"] = []
HELPERS: list["subprocess.Popen[bytes]"] = []


@reward(timeout_s=30)
def ask_helper() -> float:
    """Return how many calls the helper of this worker has lived through."""
    if not HELPERS:
        HELPERS.append(subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0))
    (helper,) = HELPERS
    assert helper.stdin is not None
    assert helper.stdout is not None
    helper.stdin.write(b"x")
    CALLS.append(len(helper.stdout.read(1)))
    return sum(CALLS)


CALLS: list[int] = []


def start_server() -> None:
    SERVERS.append(subprocess.Popen(["sleep", "600"], start_new_session=True))


SERVERS: list["subprocess.Popen[bytes]"] = []


@reward(timeout_s=30, prepare=start_server)
def has_server() -> bool:
    return SERVERS[0].poll() is None


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


class Panic(BaseException):
    """As libraries written in Rust raise it."""


def recurse(depth: int) -> int:
    return recurse(depth + 1) + 1


async def later() -> float:
    return 1.0


@reward(timeout_s=2.0)
def nonsense(kind: str) -> Any:
    match kind:
        case "exit":
            sys.exit(3)
        case "interrupt":
            raise KeyboardInterrupt
        case "panic":
            raise Panic("in Rust")
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "leave":
            os._exit(7)
        case "none":
            return None
        case "nan":
            return math.nan
        case "1e400":
            return 1e400
        case "10**400":
            return 10**400
        case "text":
            return "1.0"
        case "not awaited":
            return later()
        case "flood":
            return "x" * 10**8
        case "no words":
            raise RewardError("")
        case "no reason":
            raise Reject
        case "half":
            raise ValueError("\ud800")
        case "closed":
            os.closerange(3, 100)
        case "recursion":
            recurse(0)
        case "hold the interpreter":
            sum(range(10**12))
        case "leaks":
            threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
            print("x" * 10**5)
    return 1.0
