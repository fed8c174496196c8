"""The near end of a reward worker: start it, send it calls, kill it when it is late."""

import atexit
import math
import os
import select
import signal
import struct
import subprocess
import time
from contextlib import suppress

import msgspec

from areal_async.errors import RewardError
from areal_async.process.interpreter import module_command
from areal_async.rollout.rewards.worker import FRAME, MAX_ANSWER_BYTES, Answer

START_DEADLINE_S = 120.0
"""Time for starting the interpreter and importing the user's file, which is not the reward's own."""

DYING_S = 2.0
"""A process that ends closes its pipes first: so long it may take until its status is known."""

KEEPING_S = 5.0
"""Time that a worker's keeper has to kill all that is below it."""


class RewardProcess:
    """One worker process. Used by one thread at a time; dead after the first late or broken call."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            module_command("areal_async.rollout.rewards.worker", str(os.getpid())),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # so that what the reward starts can be killed with it
            bufsize=0,
        )
        _living.add(self)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def call(self, name: str, request: bytes, *, timeout_s: float) -> float:
        """Run one call and return its value.

        Raises:
            RewardError: it failed in any way; the worker is gone if it was late or broken.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(struct.pack(FRAME, len(request)) + request)
            # The first answer says that the function is imported and prepared: from here on the time is the reward's.
            answer = self._read_answer(START_DEADLINE_S)
            if not answer.error:
                answer = self._read_answer(timeout_s)
        except TimeoutError as exc:
            self.close()
            raise RewardError(f"reward {name}: ran past {exc} s and was killed") from None
        except (OSError, EOFError) as exc:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(DYING_S)
            self.close()
            what = f" ({exc})" if str(exc) else ""
            raise RewardError(f"reward {name}: its worker died with status {self._process.returncode}{what}") from exc
        if answer.error:
            raise RewardError(f"reward {name}: {answer.error}")
        return answer.value

    def close(self) -> None:
        """Kill the worker and whatever it started: its keeper knows what has left the session."""
        _living.discard(self)
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(KEEPING_S)
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _read_answer(self, deadline_s: float) -> Answer:
        ends_at = time.monotonic() + deadline_s
        length = decode_length(self._read(struct.calcsize(FRAME), ends_at, deadline_s))
        return decode_answer(self._read(length, ends_at, deadline_s))

    def _read(self, num_bytes: int, ends_at: float, deadline_s: float) -> bytes:
        assert self._process.stdout is not None
        poll = select.poll()  # unlike select(), takes any file descriptor
        poll.register(self._process.stdout, select.POLLIN)
        data = b""
        while len(data) < num_bytes:
            left_ms = max(0.0, ends_at - time.monotonic()) * 1000
            if not poll.poll(left_ms):
                raise TimeoutError(f"{deadline_s:g}")
            chunk = self._process.stdout.read(num_bytes - len(data))
            if not chunk:
                raise EOFError
            data += chunk
        return data


def decode_length(head: bytes) -> int:
    """Return how many bytes follow.

    Raises:
        EOFError: more than any answer has: what the worker writes is not the protocol.
    """
    (length,) = struct.unpack(FRAME, head)
    if length > MAX_ANSWER_BYTES:
        raise EOFError(f"got an answer of {length} bytes, need at most {MAX_ANSWER_BYTES}")
    return int(length)


def decode_answer(data: bytes) -> Answer:
    """Decode one answer.

    Raises:
        EOFError: it is none, or its value is no finite number.
    """
    try:
        answer = msgspec.msgpack.decode(data, type=Answer)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise EOFError(f"got no answer: {exc}") from exc
    if not math.isfinite(answer.value):
        raise EOFError(f"got the value {answer.value}, need a finite number")
    return answer


_living: set[RewardProcess] = set()


@atexit.register
def _close_all() -> None:
    for process in list(_living):
        process.close()
