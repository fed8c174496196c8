"""What ``try``, ``eval`` and ``compare`` run workflows in, as a node does: a server, an endpoint, a trial; no bus."""

import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import FrameType

import anyio
import anyio.to_thread

from areal_async.config.settings import Settings, TaskSettings
from areal_async.errors import UserError, leaves_of
from areal_async.inference.client import InferenceClient
from areal_async.inference.commands import NO_VERSION, draws_by_seed
from areal_async.inference.external_servers import Facts, visited_servers
from areal_async.rollout.endpoint.policy import PolicyMaker
from areal_async.rollout.endpoint.server import AgentEndpoint
from areal_async.rollout.frozen import serve_frozen
from areal_async.rollout.policy.text import TextCodec, load_codec
from areal_async.rollout.trial import TRIAL, Trial
from areal_async.rollout.user_code.loop_interrupter import LoopInterrupter
from areal_async.rollout.user_code.loop_watchdog import LoopWatchdog
from areal_async.rollout.user_code.per_node import given_per_node
from areal_async.rollout.user_code.source_location import UserCode
from areal_async.rollout.user_code.workflows import load_workflow, policies_taken
from areal_async.rollout.workflow_call import TaskWorkflow
from areal_async.telemetry import log
from areal_async.user_files import parts_of


@asynccontextmanager
async def opened_trial(
    settings: Settings,
    task: TaskSettings,
    *,
    urls: Sequence[str],
    logs: Path,
    max_streams: int,
    tell: Callable[[str], None],
    eval_id: str | None = None,
    seed: int | None = None,
) -> AsyncIterator[tuple[Trial, TextCodec]]:
    """Have a trial of the task's workflow, and what its tokens are read with.

    While the block runs, whoever holds up the loop is named at once, and ended where a node would not bear it.

    Args:
        urls: servers that run already; none for one that is started here.
        logs: folder of the logs of servers that are started here.
        tell: takes what the user should know.
        eval_id: as rows are evaluated, one sibling at a time; named so in traces. None does as in training.
        seed: of what is drawn, as ``Trial`` takes it; nothing where the servers draw by none.

    Raises:
        UserError: the workflow cannot be loaded, or a server is not there or cannot start.
    """
    user_code = UserCode(parts_of(task.workflow)[0])
    plain = load_workflow(task.workflow, policies=settings.policies, env=settings.env_of(task))
    taken = policies_taken(plain, settings.policies)
    used = settings.model_copy(
        update={
            "policies": {name: settings.policies[name] for name in taken},
            "inference": settings.inference.model_copy(update={"num_servers": 1}),  # one is started here
        }
    )
    async with (
        _loading_codec(settings) as loaded,
        visited_servers(settings, urls, log_path=logs / "server.log") as (pool, facts),
    ):
        codec = await loaded()
        if urls:
            _compare_tokenizers(settings.model.path, facts, tell)
        async with (
            InferenceClient(
                pool,
                settings.inference,
                max_streams=max_streams,
                vocab_size=codec.vocab_size,
                vision=codec.vision,
            ) as client,
            AgentEndpoint(settings.endpoint) as endpoint,
            serve_frozen(used, node_id=TRIAL, log_directory=logs, max_streams=max_streams) as frozen,
            given_per_node(
                {task.name: plain}, deadline_s=settings.rollout.setup_deadline_s, waiter=TRIAL, tell=tell
            ) as given,
        ):
            trial = Trial(
                TaskWorkflow(task.name, given[task.name], settings, frozen),
                PolicyMaker(generator=client, codec=codec, endpoint=endpoint, call_parser=client.call_parser),
                user_code=user_code,
                version=facts[0].version if facts else NO_VERSION,
                eval_id=eval_id,
                seed=seed if draws_by_seed(settings.inference) else None,
            )
            async with _watched(user_code, deadline_s=settings.rollout.loop_deadline_s):
                yield trial, codec


@asynccontextmanager
async def _loading_codec(settings: Settings) -> AsyncIterator[Callable[[], Awaitable[TextCodec]]]:
    """Load the tokenizer while the block runs, a server starting in it, say; yield what waits for it.

    That raises what is wrong with it, so that of two mistakes the same is told each time.
    """
    outcomes = list[TextCodec | UserError]()
    is_there = anyio.Event()

    async def load() -> None:
        try:
            outcomes.append(await anyio.to_thread.run_sync(load_codec, settings.model.path, settings.rollout.template))
        except UserError as exc:
            outcomes.append(exc)
        is_there.set()

    async def loaded() -> TextCodec:
        await is_there.wait()
        if isinstance(outcomes[0], UserError):
            raise outcomes[0]
        return outcomes[0]

    async with anyio.create_task_group() as loading:
        loading.start_soon(load)
        yield loaded


@asynccontextmanager
async def _watched(user_code: UserCode, *, deadline_s: float) -> AsyncIterator[None]:
    """Name what holds up the loop at once, and end it where it does so for as long as a node would bear it."""
    watch = LoopWatchdog()
    interrupter = LoopInterrupter(user_code, deadline_s=deadline_s)
    async with anyio.create_task_group() as watching:
        watching.start_soon(watch.run_beats)
        watching.start_soon(interrupter.run_beats)
        with watch.watching(), interrupter.watching():
            yield
        watching.cancel_scope.cancel()


def _compare_tokenizers(ours: str, facts: Sequence[Facts], tell: Callable[[str], None]) -> None:
    """Warn where a server may read token ids otherwise than they are written here."""
    for fact in facts:
        if Path(fact.tokenizer_path).name != Path(ours).name:
            tell(
                f"warning: server {fact.url} runs {fact.tokenizer_path}, tokens are made by model.path {ours}; "
                "these must be the same model's"
            )


class TemporaryFolder:
    """A folder to which a verb logs, and which is gone afterwards, unless an error tells the user to look into it.

    Until then SIGTERM ends the verb as Ctrl-C does.
    """

    def __init__(self, verb: str) -> None:
        self._verb = verb

    def __enter__(self) -> Path:
        self._folder = Path(tempfile.mkdtemp(prefix=f"areal-{self._verb}-"))
        log.configure(self._verb, self._folder)
        self._before = signal.signal(signal.SIGTERM, _as_ctrl_c)
        return self._folder

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        signal.signal(signal.SIGTERM, self._before)
        told = [] if error is None else leaves_of(error)
        if not any(str(self._folder) in str(leaf) for leaf in told):
            log.configure(self._verb, None)  # what is logged from here on, as Python ends, has no file to go to
            shutil.rmtree(self._folder, ignore_errors=True)


def _as_ctrl_c(_: int, frame: FrameType | None) -> None:
    """Do what Ctrl-C does here, also where a shell has this process ignore that, as one in the background."""
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler):
        raise KeyboardInterrupt
    handler(signal.SIGINT, frame)
