"""Jobs beside the ring follow one another, and a failed one is not overlooked."""

import threading

import anyio
import pytest

from areal_async.trainer.engine.threads import BackgroundJob, EngineThread

pytestmark = [pytest.mark.anyio, pytest.mark.both_loops]


async def test_a_job_goes_on_beside_its_starter_and_the_next_waits_for_it() -> None:
    done: list[int] = []
    gates = [anyio.Event(), anyio.Event()]

    async def job(number: int) -> None:
        await gates[number].wait()
        done.append(number)

    async with anyio.create_task_group() as tasks:
        beside = BackgroundJob(tasks)
        await beside.finish()
        await beside.start(lambda: job(0))
        tasks.start_soon(beside.start, lambda: job(1))
        gates[1].set()
        await anyio.wait_all_tasks_blocked()
        assert done == []

        gates[0].set()
        await beside.finish()

        assert done[0] == 0
    assert done == [0, 1]


async def test_a_job_that_fails_ends_whoever_waits_for_it() -> None:
    async def job() -> None:
        raise ValueError("no room")

    async def start_and_wait() -> None:
        async with anyio.create_task_group() as tasks:
            beside = BackgroundJob(tasks)
            await beside.start(job)
            await beside.finish()
            raise AssertionError("it was to end before")

    with pytest.raises(ExceptionGroup) as raised:
        await start_and_wait()

    assert [str(error) for error in raised.value.exceptions] == ["no room"]


async def test_the_engine_computes_in_one_thread() -> None:
    thread = EngineThread()

    names = {await thread.run(lambda: threading.current_thread().name) for _ in range(3)}

    assert len(names) == 1
    assert names != {threading.current_thread().name}
