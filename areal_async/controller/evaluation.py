"""Evaluation of held-out rows: tickets out, results in, one record per evaluated version and task.

Beside training: own subjects, no credits, never trained. What an evaluation has got so far lives in the
stream until it is whole, so a restarted controller collects it again. What nobody waits for goes at once, and all of it
where the stream gets full: it holds tickets and results, and any process that finds no room waits for it.
"""

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType

import anyio
import anyio.to_thread
import msgspec
import structlog
from anyio.abc import TaskGroup

from areal_async.bus import Bus, Delivery, Inbox
from areal_async.controller.evaluation_images import EvaluationImages
from areal_async.controller.row_images import RowImages
from areal_async.controller.tasks import Tasks
from areal_async.protocol import wire
from areal_async.protocol.evaluations import EvalRecord, EvalResult, EvalTicket
from areal_async.protocol.events import EvaluationFinished
from areal_async.protocol.subjects import EVALUATIONS
from areal_async.protocol.types import Version
from areal_async.telemetry import spans
from areal_async.versions import evaluations
from areal_async.versions.accuracy import sum_up

RESULT_BATCH = 256
MAX_ATTEMPTS = 3
LOST = f"its ticket or its result was lost {MAX_ATTEMPTS} times"
FULL_SHARE = 0.5
"""Share of the stream's bytes from which on results are held in memory alone, and no more tickets are stored."""
FULL_POLL_S = 0.5
TICKETS_BYTES = 4 << 20
"""Bytes of tickets that are stored between two looks at how full the stream is."""
Answer = tuple[int, int]
"""A row by its place, and which of the answers to it."""

log = structlog.get_logger()


class Evaluator:
    """Evaluates one version at a time, all tasks side by side."""

    def __init__(
        self,
        bus: Bus,
        held_out: Tasks,
        *,
        file: Path,
        num_samples: int = 1,
        rows: RowImages | None = None,
        asked: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Take held-out rows.

        Args:
            file: takes a line for each record; what each row got goes into ``evaluations/`` beside it.
            num_samples: answers to each row.
            rows: takes in their images; ``None`` where they have none.
            asked: what tells each task's questions from others, for the records (``versions.evaluations.asked_of``).
        """
        self._bus = bus
        self._rows = held_out
        self._images = EvaluationImages(bus, rows) if rows is not None and held_out.names_with_images else None
        self._wanted = [(index, sample) for index in range(len(held_out)) for sample in range(num_samples)]
        self._num_samples = num_samples
        self._asked = asked
        self._file = file
        self._num_unasked = 0
        """Tickets that are not stored yet."""
        self.waits_for = ""

    def end_training(self) -> None:
        """Have the images of training groups make room from now on: nothing is trained any more."""
        if self._images is not None:
            self._images.is_training_over = True

    async def is_done(self, step: int, *, counts: Callable[[Version], bool]) -> bool:
        """Whether the evaluation due at this step was made before, in whatever lineage.

        Args:
            counts: whether that of a version does: not where the run went back behind it since.
        """
        for name in self._rows.names:
            record, _ = await self._bus.get(self._bus.names.evaluation_key(step, name), EvalRecord)
            if record is None or not counts(Version.parse(record.eval_id)):
                return False
        return True

    async def made(self) -> dict[Version, list[EvalRecord]]:
        """Return every evaluation that is whole: one record per task, by the version held when it began."""
        found: dict[Version, dict[str, EvalRecord]] = {}
        for record, _ in (await self._bus.entries(EVALUATIONS, EvalRecord)).values():
            found.setdefault(Version.parse(record.eval_id), {})[record.workflow] = record
        names = self._rows.names
        return {
            version: [by_task[name] for name in names]
            for version, by_task in found.items()
            if by_task.keys() >= set(names)
        }

    async def evaluate(self, version: Version, *, due_step: int, on_result: Callable[[], None]) -> list[EvalRecord]:
        """Have every answer given, under the weights that the servers hold while they are.

        One whose ticket or result could not be read is asked again, ``MAX_ATTEMPTS`` times in all. A version that was
        evaluated before is not asked again: its answers would be the same, and stand for this step too.

        Args:
            version: held when it begins; the records, one per task, say which ones it spanned.
            due_step: the step at which it was due.
            on_result: called at every result, which is progress for those who watch.
        """
        if before := (await self.made()).get(version):
            for record in before:
                await self._bus.put(self._bus.names.evaluation_key(due_step, record.workflow), record)
            return before
        names = self._bus.names
        if self._images is not None:  # what an evaluation has left behind that was never whole
            await self._images.remove_all(keeping=str(version))
        async with self._bus.consume(names.eval_stream, names.eval_controller_consumer) as inbox:
            async with anyio.create_task_group() as asking:
                results, held = await self._collect(str(version), inbox, asking, on_result)
                asking.cancel_scope.cancel()
            records = self._summarise(version, results)
            answers = [self._answer(result) for result in results]
            await anyio.to_thread.run_sync(evaluations.write, self._file.parent, version, answers)
            with self._file.open("a") as file:  # before it counts as made: a repeated line does less harm than none
                file.writelines(json.dumps(msgspec.structs.asdict(record)) + "\n" for record in records)
            for record in records:
                await self._bus.put(self._bus.names.evaluation_key(due_step, record.workflow), record)
            await self._bus.settle(held)
        if self._images is not None:
            await self._images.remove_all()
        self.waits_for = ""
        for record in records:
            facts = msgspec.structs.asdict(record)
            told = {name: value for name, value in facts.items() if name in EvaluationFinished.__struct_fields__}
            await self._bus.publish_event(EvaluationFinished(version=record.eval_id, **told))
            log.info("evaluation.finished", **facts)
        return records

    async def _collect(
        self, eval_id: str, inbox: Inbox, asking: TaskGroup, on_result: Callable[[], None]
    ) -> tuple[Collection[EvalResult], list[Delivery]]:
        """Ask every row, and return all answers, with those of their messages that are still in the stream.

        consumes:     results
        waits for:    the next ones
        produces:     tickets; room, by settling what is of no use or as good as lost in a full stream
        unblocked by: a result for every answer, or ``MAX_ATTEMPTS`` tickets of it that came to nothing
        """
        names, attempt = self._bus.names, 0
        asking.start_soon(self._ask, eval_id, self._wanted, attempt)
        results: dict[Answer, EvalResult] = {}
        wanted = set(self._wanted)
        held: dict[int, Delivery] = {}
        is_answered = False
        while len(results) < len(wanted):
            room = self._images.waits_for if self._images is not None else ""
            self.waits_for = f"{len(wanted) - len(results)} evaluation results of {eval_id}{room and f', and {room}'}"
            arrived = await inbox.fetch(RESULT_BATCH, wait_s=0.5 if is_answered else 2.0)
            useless: list[Delivery] = []
            for delivery in arrived:
                result = await self._bus.decode(delivery, EvalResult)
                if result is None:
                    continue
                answer = result.index, result.sample
                if delivery.sequence in held:  # nobody has acked it yet: it replaces itself, and is no news
                    held[delivery.sequence] = delivery
                elif result.eval_id == eval_id and answer in wanted and answer not in results:
                    held[delivery.sequence] = delivery
                    results[answer] = result
                    spans.received_result(result, delivery)
                    on_result()
                else:
                    useless.append(delivery)
            await self._bus.settle(useless)
            if self._images is not None:
                await self._images.remove_answered(wanted - results.keys())
            if await self._is_nearly_full():
                await self._bus.settle(list(held.values()))
                held.clear()
            if arrived:
                is_answered = False
            elif not is_answered:
                num_asked = await self._bus.num_unsettled(names.eval_stream, names.eval_nodes_consumer)
                is_answered = not self._num_unasked and not num_asked
                if not num_asked and self._images is not None and self._images.waits_for:
                    await self._images.give_up()
            else:  # no ticket is left, and nothing has come since: what is missing is lost
                attempt, is_answered = attempt + 1, False
                lost = [answer for answer in self._wanted if answer not in results]
                log.warning("evaluation.results_lost", eval_id=eval_id, num_lost=len(lost), attempt=attempt)
                if attempt < MAX_ATTEMPTS:
                    asking.start_soon(self._ask, eval_id, lost, attempt)
                else:
                    results |= {
                        one: EvalResult(eval_id=eval_id, index=one[0], sample=one[1], error=LOST) for one in lost
                    }
        return results.values(), list(held.values())

    async def _is_nearly_full(self) -> bool:
        state = await self._bus.stream_state(self._bus.names.eval_stream)
        return state.num_bytes > FULL_SHARE * state.max_bytes > 0

    def _summarise(self, version: Version, results: Collection[EvalResult]) -> list[EvalRecord]:
        own: dict[str, list[EvalResult]] = {name: [] for name in self._rows.names}
        for result in results:
            own[self._rows.name_at(result.index)].append(result)
        records = [_record(version, workflow, part, self._num_samples) for workflow, part in own.items()]
        return [msgspec.structs.replace(one, asked=self._asked.get(one.workflow, "")) for one in records]

    def _answer(self, result: EvalResult) -> evaluations.Answer:
        task, row = self._rows.place(result.index)
        return evaluations.Answer(
            task=task,
            row=row,
            sample=result.sample,
            reward=None if result.error else result.reward,
            error=result.error[: evaluations.MAX_ERROR],
            num_tokens=result.num_tokens,
        )

    async def _ask(self, eval_id: str, answers: Collection[Answer], attempt: int) -> None:
        """Store the tickets, never so many that no result finds room beside them."""
        self._num_unasked = len(answers)
        tickets: list[EvalTicket] = []
        num_bytes = 0
        for index, sample in answers:
            ready = await self._images.ready(eval_id, index) if self._images is not None else None
            workflow, row, images = ready or (*self._rows.at(index), [])
            ticket = EvalTicket(
                eval_id=eval_id, index=index, workflow=workflow, row=row, attempt=attempt, sample=sample, images=images
            )
            tickets.append(ticket)
            num_bytes += len(wire.encode(ticket))
            if num_bytes > TICKETS_BYTES or images:  # whose room somebody else may wait for
                await self._publish_all(tickets)
                tickets, num_bytes = [], 0
        await self._publish_all(tickets)

    async def _publish_all(self, tickets: Collection[EvalTicket]) -> None:
        """Store tickets as soon as there is room."""
        while await self._is_nearly_full():
            log.info("evaluation.waits_for_room", num_unasked=self._num_unasked)
            await anyio.sleep(FULL_POLL_S)
        async with anyio.create_task_group() as publishing:
            for ticket in tickets:
                publishing.start_soon(self._publish, ticket)

    async def _publish(self, ticket: EvalTicket) -> None:
        subject = self._bus.names.eval_tickets(ticket.workflow)
        msg_id = f"eval-ticket.{ticket.answer}.{ticket.attempt}"
        with spans.asked(ticket):
            await self._bus.publish_patiently(subject, ticket, msg_id=msg_id)
        self._num_unasked -= 1


def _record(version: Version, workflow: str, results: Collection[EvalResult], num_samples: int) -> EvalRecord:
    scored = [result for result in results if not result.error]
    answers = [(result.index, None if result.error else result.reward, result.error) for result in results]
    return EvalRecord(
        eval_id=str(version),
        step=version.step,
        workflow=workflow,
        oldest=str(min((Version.parse(result.oldest) for result in scored if result.oldest), default=version)),
        newest=str(max((Version.parse(result.newest) for result in scored if result.newest), default=version)),
        **sum_up(answers, num_samples=num_samples),
    )
