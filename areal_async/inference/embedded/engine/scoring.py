"""The line of prompts that wait for a score: those that wait together are computed together."""

import asyncio
from collections import deque
from concurrent.futures import Future

from areal_async.inference.embedded.engine.runner import MAX_SCORED_TOKENS, ScoringRunner
from areal_async.inference.embedded.engine.worker import ModelThread

_Answer = Future[list[float]]


class ScoreLine:
    """The prompts that wait for their scores; on the event loop, but for the passes themselves."""

    def __init__(self, runner: ScoringRunner, thread: ModelThread) -> None:
        self._runner = runner
        self._thread = thread
        self._waiting: deque[tuple[list[int], _Answer]] = deque()
        self._open: set[_Answer] = set()

    async def score(self, prompt_ids: list[int]) -> list[float]:
        """Return the head's output at the last token of a prompt that was checked."""
        answer: _Answer = Future()
        self._open.add(answer)
        self._waiting.append((prompt_ids, answer))
        # Whichever of these runs first takes along all who came meanwhile; the others find nothing.
        self._thread.post(lambda scheduler: self._run_pass())
        try:
            return await asyncio.wrap_future(answer)
        finally:
            self._open.discard(answer)

    def fail_all(self, message: str) -> None:
        """End every request when the model thread is gone."""
        for answer in self._open:
            if not answer.done():
                answer.set_exception(RuntimeError(message))

    def _run_pass(self) -> None:
        """Score the first of those that wait, on the model thread."""
        taken: list[tuple[list[int], _Answer]] = []
        num_tokens = 0
        while self._waiting:
            num_tokens += len(self._waiting[0][0])
            if taken and num_tokens > MAX_SCORED_TOKENS:
                break
            taken.append(self._waiting.popleft())
        if taken:
            scores = self._runner.score([prompt_ids for prompt_ids, _ in taken])
            for (_, answer), score in zip(taken, scores, strict=True):
                if answer.set_running_or_notify_cancel():  # else its client is gone
                    answer.set_result(score)
