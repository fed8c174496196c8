"""Ranks that are joined once and do together what tests send them: a process each, for the whole session.

They are forked from one process that has imported what they need, which takes longer than most of what they do; and
what a process does for its first model, such as making kernels and groups, it does once for all tests.
"""

import multiprocessing
import os
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from areal_async.process.host import LOOPBACK, free_port
from areal_async.trainer.engine.parallel.ranks import Ranks, joined_ranks

P = ParamSpec("P")
T = TypeVar("T")

ROOT = Path(__file__).parents[3]
DEADLINE_S = 250.0
forked = multiprocessing.get_context("forkserver")
forked.set_forkserver_preload(["tests.unit.trainer.rank_imports"])


class RankWorkers:
    """Some ranks of one group, started with the first work, on devices from ``first_device`` on."""

    def __init__(self, num_ranks: int, *, first_device: int = 0) -> None:
        self._num_ranks = num_ranks
        self._first_device = first_device
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._log: Any = None
        """What the ranks print, their errors too."""

    def run(self, work: Callable[Concatenate[Ranks, P], T], *given: P.args, **named: P.kwargs) -> list[T]:
        """Return what ``work`` returns on each rank, called with its ``Ranks`` and with what is given.

        ``work`` stands in a module. A rank that leaves with exit status 0 returns None. Where one leaves, or fails,
        the next work is done by new processes: what a broken group does is nobody's to say.

        Raises:
            AssertionError: it raised on a rank, or took longer than ``DEADLINE_S``.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((work, given, named))
        answers: dict[int, Any] = {}
        ends_at = time.monotonic() + DEADLINE_S
        is_whole = False
        try:
            while len(answers) < self._num_ranks:
                left = [pipe for rank, pipe in enumerate(self._pipes) if rank not in answers]
                ready = wait(left, max(0.0, ends_at - time.monotonic()))
                assert ready, f"ranks {sorted(set(range(self._num_ranks)) - set(answers))}: silent for {DEADLINE_S:g} s"
                answers |= {self._pipes.index(pipe): self._answer(pipe) for pipe in ready}
            is_whole = all(process.is_alive() for process in self._processes)
        finally:
            if not is_whole:
                self.close()
        return [answers[rank] for rank in range(self._num_ranks)]

    def close(self) -> None:
        """End the processes."""
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            pipe.close()
            process.kill()
            process.join()
        if self._log is not None:
            self._log.close()
        self._processes, self._pipes = [], []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        self._log = NamedTemporaryFile("r")
        shared = {"WORLD_SIZE": str(self._num_ranks), "MASTER_ADDR": LOOPBACK, "MASTER_PORT": str(free_port())}
        for rank in range(self._num_ranks):
            ours, theirs = forked.Pipe()
            environment = shared | {"RANK": str(rank), "LOCAL_RANK": str(self._first_device + rank)}
            process = forked.Process(target=_be_a_rank, args=(environment, theirs, self._log.name), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _answer(self, pipe: Any) -> Any:
        try:
            return pipe.recv()
        except EOFError:
            rank = self._pipes.index(pipe)
            self._processes[rank].join()
            status = self._processes[rank].exitcode
            assert status == 0, f"rank {rank} ended with {status}: {self._log.read()[-2000:]}"
            return None


def _be_a_rank(environment: Mapping[str, str], pipe: Connection, log: str) -> None:
    for number in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), number)
    os.chdir(ROOT)
    os.environ.update(environment)
    with joined_ranks(deadline_s=200.0) as ranks:
        while True:
            work, given, named = pipe.recv()
            pipe.send(work(ranks, *given, **named))
