"""Jobs beside the ring follow one another, and a failed one is not overlooked."""

import threading

import anyio
import pytest
import torch

from areal_async.config.settings import Settings, TrainerSettings
from areal_async.trainer.engine.engines import EngineThreads
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.engine.threads import BackgroundJob, EngineThread

CPU = torch.device("cpu")

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
    thread = EngineThread(CPU)

    names = {await thread.run(lambda: threading.current_thread().name) for _ in range(3)}

    assert len(names) == 1
    assert names != {threading.current_thread().name}


async def test_each_thread_of_a_rank_takes_the_ranks_device(monkeypatch: pytest.MonkeyPatch, ranks: Ranks) -> None:
    """It is a thread's own: on a GPU what was not taken is the first one's."""
    taken: dict[int, torch.device] = {}
    monkeypatch.setattr(torch.cpu, "set_device", lambda device: taken.setdefault(threading.get_ident(), device))
    threads = EngineThreads.for_run(Settings(), ranks)

    used = {role: await threads.run(role, threading.get_ident) for role in ("actor", "critic", "reference", "")}

    assert len(set(used.values())) == 4
    assert taken == dict.fromkeys(used.values(), ranks.device)


@pytest.mark.parametrize("is_aside", [True, False])
async def test_a_thread_aside_has_a_stream_of_its_own_on_a_gpu(monkeypatch: pytest.MonkeyPatch, is_aside: bool) -> None:
    """All threads of a process share one else, and what is sent beside a step waits for the step."""
    taken: list[tuple[int, object]] = []
    device = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda of: f"stream of {of}")
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: taken.append((threading.get_ident(), stream)))
    thread = EngineThread(device, is_aside=is_aside)

    used = await thread.run(threading.get_ident)

    assert taken == ([(used, "stream of cuda:1")] if is_aside else [])


async def test_compiled_models_are_asked_in_one_thread(ranks: Ranks) -> None:
    """While torch traces, modules are called its way in every thread of the process."""
    threads = EngineThreads.for_run(Settings(trainer=TrainerSettings(compile=True)), ranks)

    assert len({await threads.run(role, threading.get_ident) for role in ("actor", "critic", "reference", "")}) == 1
