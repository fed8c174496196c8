"""A side of a comparison that the nodes of its live run answer, beside training and at a share of it (``eval.share``).

A node serves the version as it serves an arm. Rows are asked from here, and answers come into the comparison's folder:
whoever ends this, the same command goes on with what is missing.
"""

import secrets
import shutil
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TypeGuard

import anyio

from areal_async.bus import Bus, ask_service, gather_reports
from areal_async.cli.compare.contenders import Contender
from areal_async.cli.compare.progress import TELL_S, tell_progress
from areal_async.cli.orders import ANSWER_DEADLINE_S, who
from areal_async.config.settings import Settings
from areal_async.controller.compare_orders import COMPARE, LEASE_S
from areal_async.data.images import holds_images
from areal_async.data.rows import RowPrompts
from areal_async.errors import BusError, UnansweredError, UserError
from areal_async.launch.run import NotLiveError, visit_live
from areal_async.launch.run_directory import RunDirectory
from areal_async.protocol.arms import MAX_OPEN, ArmAnswer, ArmTicket, Pinned
from areal_async.protocol.evaluations import EvalResult
from areal_async.protocol.run_state import Control, RunState
from areal_async.protocol.subjects import ADMITTED, CONTROL, RUN_STATE
from areal_async.protocol.types import Admitted
from areal_async.telemetry import log as logging
from areal_async.versions.arms import FOLDER
from areal_async.versions.comparison import SHOWN_DIGITS, Answer, Asked, ComparisonFolder, Which

ROUND_S = 1.0
RENEW_S = LEASE_S / 4
PATIENCE_S = 600.0
"""Time beside that of an episode in which some answer must come."""
LOST_LOOKS = 3
"""Looks in a row at which neither a ticket nor an answer was there of what is missing."""
MAX_ATTEMPTS = 3
LOST = f"its ticket or its answer was lost {MAX_ATTEMPTS} times"
LAST_WORDS_S = 2.0
ENDING_S = 60.0
"""For the processes of a run that has ended to go."""
REPORT_S = 1.0


def refuse_what_nodes_cannot(settings: Settings, prompts: Mapping[str, RowPrompts], given: str) -> None:
    """Refuse a comparison that the nodes of a live run cannot answer.

    Args:
        given: the first word that says something otherwise than the run's settings; empty for none.

    Raises:
        UserError: there is one, they are not to answer any, or the rows have images.
    """
    run = settings.run.name
    if given:
        raise UserError(
            f"{given}: got it for the live run {run}, whose nodes answer by its settings; give --here as well"
        )
    if not settings.eval.share:
        raise UserError(f"compare: run {run} lives with eval.share=0, so its nodes answer for nobody; give --here")
    if settings.inference.colocate is not None:
        raise UserError(f"compare: run {run} lives and its servers share the trainer's GPUs; stop it, or give --here")
    for name, own in prompts.items():
        if len(own) and holds_images(own[0].row):
            raise UserError(f"compare: rows of {name} have images, and nodes are asked rows of text; give --here")


def ask_nodes(
    directory: RunDirectory,
    folder: ComparisonFolder,
    which: Which,
    contender: Contender,
    rows: Mapping[str, RowPrompts],
) -> None:
    """Have the nodes of a live run answer what one side has not answered yet, as far as the run goes on.

    Raises:
        UserError: the run refuses, or for long no answer came.
    """
    if not any(asked[0] == which for asked in folder.left):
        return
    digest = folder.comparison.digest[:SHOWN_DIGITS]
    # Where every node finds it, and no retention deletes it.
    place = (directory.path / FOLDER / f"compare_{digest}_{which}").absolute()
    try:
        tell_progress(f"{contender.side.name} is written for the nodes of run {directory.path.name}")
        model = contender.written(place).model.path
        name = f"compare_{digest}_{which}"
        side = Pinned(
            name=name, arm_id=f"{name}-{secrets.token_hex(4)}", version=contender.side.version, path=str(model)
        )
        logging.quieten()
        anyio.run(partial(_ask, directory, folder, which, side, rows), backend_options={"use_uvloop": True})
    finally:
        shutil.rmtree(place, ignore_errors=True)


async def _ask(
    directory: RunDirectory, folder: ComparisonFolder, which: Which, side: Pinned, rows: Mapping[str, RowPrompts]
) -> None:
    is_whole = False
    try:
        async with visit_live(directory) as (settings, bus):
            is_whole = await NodeQuestions(bus, settings, folder, which, side, rows).run()
    except* (NotLiveError, UnansweredError, BusError):
        if directory.is_live:
            raise
    if is_whole:
        return
    tell_progress(f"run {directory.path.name} has ended: a server that is started here goes on")
    with anyio.move_on_after(ENDING_S):
        while True:
            if not directory.is_live:
                return
            await anyio.sleep(ROUND_S)


@dataclass
class _Open:
    """An answer that is asked for."""

    asked: Asked
    attempt: int = 0


class NodeQuestions:
    """What one side is asked, and what of it is open."""

    def __init__(
        self,
        bus: Bus,
        settings: Settings,
        folder: ComparisonFolder,
        which: Which,
        side: Pinned,
        rows: Mapping[str, RowPrompts],
    ) -> None:
        self._bus = bus
        self._settings = settings
        self._folder = folder
        self._side = side
        self._rows = rows
        self._due = deque(asked for asked in folder.left if asked[0] == which)
        self._num_wanted = len(self._due)
        self._open: dict[int, _Open] = {}
        """By the number of the ticket."""
        self._num_asked = 0
        self._num_lost_looks = 0
        self._first_admission = 0

    @property
    def _num_answered(self) -> int:
        return self._num_wanted - len(self._due) - len(self._open)

    async def run(self) -> bool:
        """Ask and take in until all is answered, or the run has ended; return whether all is.

        consumes:     answers
        waits for:    the next ones, and for training to ask for more
        produces:     tickets, a line of the comparison's file for each answer
        unblocked by: nodes

        Raises:
            UserError: the run refuses, or no answer has come for ``PATIENCE_S`` beside an episode's deadline.
        """
        try:
            self._first_admission = (await self._admitted()).total
            await self._begin()
            async with anyio.create_task_group() as beside:
                beside.start_soon(self._run_lease)
                beside.start_soon(self._run_telling)
                while (self._due or self._open) and not await self._has_ended():
                    is_news = await self._take_in()
                    await self._ask_due()
                    if not is_news:
                        await self._look_for_lost()
                    await anyio.sleep(ROUND_S)
                beside.cancel_scope.cancel()
            return not (self._due or self._open)
        finally:
            with anyio.move_on_after(LAST_WORDS_S, shield=True), suppress(UserError, UnansweredError, BusError):
                await self._order({"name": self._side.name})

    async def _begin(self) -> None:
        """Have the version served, also where the controller is being started again."""
        ends_at_s = anyio.current_time() + self._settings.bus.operation_deadline_s
        while not await self._has_ended():
            try:
                await self._serve()
                return
            except UnansweredError:
                if anyio.current_time() > ends_at_s:
                    raise
            await anyio.sleep(ROUND_S)

    async def _run_lease(self) -> None:
        """Have the nodes go on, also where the controller that was asked is gone."""
        while True:
            await anyio.sleep(RENEW_S)
            with suppress(UnansweredError, BusError):  # a controller that is started again
                await self._serve()

    async def _run_telling(self) -> None:
        """Say how far it is, and give up where nothing comes."""
        told, since_s, patience_s = -1, anyio.current_time(), PATIENCE_S + self._settings.rollout.episode_deadline_s
        while True:
            await anyio.sleep(TELL_S)
            why = await self._hindrance()
            now_s, told_before, told = anyio.current_time(), told, self._num_answered
            since_s = now_s if told != told_before else since_s
            tell_progress(f"{self._side.version}: {told} of {self._num_wanted} answered by nodes{why}")
            if now_s > since_s + patience_s:
                raise UserError(
                    f"compare: no answer has come for {now_s - since_s:.0f} s{why}; the same command goes on later, "
                    "with --here by a server of its own"
                )

    async def _serve(self) -> None:
        await self._order({"name": self._side.name, "arm_id": self._side.arm_id, "version": self._side.version,
                           "path": self._side.path, "by": who()})  # fmt: skip

    async def _order(self, body: Mapping[str, str]) -> None:
        await ask_service(self._bus, self._bus.names.control(COMPARE), body, deadline_s=ANSWER_DEADLINE_S)

    async def _has_ended(self) -> bool:
        state, _ = await self._bus.get(RUN_STATE, RunState)
        return state is not None and state.state != "running"

    async def _admitted(self) -> Admitted:
        return (await self._bus.get(ADMITTED, Admitted))[0] or Admitted()

    async def _take_in(self) -> bool:
        """Keep the answers that have come, then remove their messages; return whether there were any."""
        stream, subject = self._bus.names.eval_stream, self._bus.names.arm_answers(self._side.arm_id)
        messages = await self._bus.read_log(stream, subject)
        for message in messages:
            answer = await self._bus.decode(message, ArmAnswer)
            if answer is not None and (found := self._open.pop(answer.number, None)) is not None:
                self._keep(found.asked, answer.result, answer.text)
        if messages:
            await self._bus.purge(stream, subject, through=messages[-1].sequence)
        return bool(messages)

    def _keep(self, asked: Asked, result: EvalResult, text: str = "") -> None:
        side, task, row, sample = asked
        self._folder.add(
            Answer(
                side=side,
                task=task,
                row=row,
                sample=sample,
                reward=None if result.error else result.reward,
                error=result.error,
                num_tokens=result.num_tokens,
                text=text,
                version=self._side.version,
            )
        )

    async def _ask_due(self) -> None:
        """Ask as many more as training's own answers allow."""
        num_admitted = (await self._admitted()).total - self._first_admission
        num_trained = num_admitted * self._settings.rollout.group_size
        num_due = int(self._settings.eval.share * num_trained) - self._num_asked
        for _ in range(min(num_due, MAX_OPEN - len(self._open), len(self._due))):
            self._num_asked += 1
            self._open[self._num_asked] = _Open(self._due.popleft())
            await self._publish(self._num_asked)

    async def _publish(self, number: int) -> None:
        question = self._open[number]
        _, task, row, sample = question.asked
        ticket = ArmTicket(
            eval_id=self._side.version,
            index=row,
            workflow=task,
            row=self._rows[task][row].row,
            attempt=question.attempt,
            sample=sample,
            arm=self._side.name,
            arm_id=self._side.arm_id,
            number=number,
            num_samples=self._folder.comparison.num_samples,
        )
        subject, msg_id = self._bus.names.arm_tickets(ticket.arm_id), f"arm-ticket.{ticket.answer}.{ticket.attempt}"
        try:
            await self._bus.publish_patiently(subject, ticket, msg_id=msg_id)
        except TypeError as exc:
            raise UserError(
                f"compare: row {row} of {task} is no JSON ({exc}), as nodes are asked it; give --here"
            ) from exc

    async def _look_for_lost(self) -> None:
        """Ask again what is open though no ticket of it is left and no answer on its way."""
        names = self._bus.names
        stored = await self._bus.stored_by_subject(names.eval_stream, names.arm_messages(self._side.arm_id))
        self._num_lost_looks = self._num_lost_looks + 1 if self._open and not stored else 0
        if self._num_lost_looks < LOST_LOOKS:
            return
        self._num_lost_looks = 0
        for number, question in list(self._open.items()):
            question.attempt += 1
            if question.attempt < MAX_ATTEMPTS:
                await self._publish(number)
            else:
                lost = self._open.pop(number)
                self._keep(lost.asked, EvalResult(eval_id=self._side.version, index=lost.asked[2], error=LOST))

    async def _hindrance(self) -> str:
        """Return why it may be slow: the run is paused, or some node does not serve the version."""
        control, _ = await self._bus.get(CONTROL, Control)
        if control is not None and control.is_paused:
            return ", and none is asked while the run is paused"
        reports = await gather_reports(self._bus, within_s=REPORT_S)
        told = {instance: report.get("arms") for (role, instance), report in sorted(reports.items()) if role == "node"}
        whys = [f"{node}: {arms[self._side.name]}" for node, arms in told.items() if self._has_told(arms)]
        return f", not by node {'; '.join(whys)}" if whys else ""

    def _has_told(self, arms: object) -> TypeGuard[dict[str, object]]:
        return isinstance(arms, dict) and self._side.name in arms
