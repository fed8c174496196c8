"""The frozen models of a node: each a fleet of its own, beside the one that holds the weights under training.

Nobody but the node knows of these servers: they stand in no key that says what the servers of the run hold, so the
trainer waits for none of them and no credit depends on them. A crash of one is fenced and restarted as ever.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import anyio.to_thread
import structlog

from areal_async.config.settings import PolicySettings, Settings
from areal_async.inference.client import InferenceClient
from areal_async.inference.commands import choose_backend
from areal_async.inference.fleet import Fleet
from areal_async.inference.pool import ServerHandle
from areal_async.inference.score_bias import needs_bias, write_with_bias
from areal_async.inference.scoring import ScoringClient
from areal_async.process.hub import local_model
from areal_async.rollout.named_policies import FrozenModel, FrozenReward
from areal_async.rollout.policy.text import TextCodec, load_codec

SCORES = "--is-embedding"
"""Has a server of either kind score prompts instead of generating."""

log = structlog.get_logger()


def settings_of(policy: PolicySettings, settings: Settings) -> Settings:
    """Return the settings that a frozen model's servers start with."""
    dtype = policy.dtype or settings.model.dtype
    own: dict[str, Any] = {name: getattr(policy, name) for name in ("num_servers", "tensor_parallel", "context_length")}
    if policy.is_reward:
        own["flags"] = (*settings.inference.flags, SCORES)
    return settings.model_copy(
        update={
            "model": settings.model.model_copy(update={"path": policy.path, "dtype": dtype}),
            "inference": settings.inference.model_copy(update=own),
        }
    )


@asynccontextmanager
async def serve_frozen(
    settings: Settings, *, node_id: str, log_directory: Path, max_streams: int
) -> AsyncIterator[Mapping[str, FrozenModel | FrozenReward]]:
    """Have the servers of all frozen models run for as long as the block does.

    Raises:
        UserError: a model is not there, or its server cannot even start.
        PipelineError: a server fails again and again; possibly inside an ExceptionGroup.
    """
    first_gpu = settings.inference.num_gpus
    models: dict[str, FrozenModel | FrozenReward] = {}
    async with anyio.create_task_group() as services, AsyncExitStack() as clients:
        for name, policy in settings.frozen_policies.items():
            own = settings_of(policy, settings)
            if policy.is_reward and choose_backend(own.inference) == "sglang":
                folder = clients.enter_context(TemporaryDirectory(prefix="areal_reward_"))
                own = await anyio.to_thread.run_sync(_with_bias, own, Path(folder))
            fleet = Fleet(
                own, node_id=node_id, log_directory=log_directory, publish=_note, frozen=name, first_gpu=first_gpu
            )
            first_gpu += own.inference.num_gpus
            services.start_soon(fleet.run)
            codec = await anyio.to_thread.run_sync(_load_codec, name, policy)
            pool, size = fleet.pool, codec.vocab_size
            if policy.is_reward:
                scorer = ScoringClient(pool, own.inference, max_requests=max_streams, vocab_size=size)
                await clients.enter_async_context(scorer)
                models[name] = FrozenReward(scorer=scorer, codec=codec, pool=pool)
                continue
            client = InferenceClient(
                pool,
                own.inference,
                max_streams=max_streams,
                vocab_size=size,
                model=own.model.path,
                vision=codec.vision,
            )
            await clients.enter_async_context(client)
            models[name] = FrozenModel(generator=client, codec=codec, pool=pool)
        yield models
        services.cancel_scope.cancel()


def _load_codec(name: str, policy: PolicySettings) -> TextCodec:
    own = f"policies.{name}"
    return load_codec(str(policy.path), policy.template, setting=f"{own}.path", template_setting=f"{own}.template")


def _with_bias(settings: Settings, directory: Path) -> Settings:
    """Return the settings with a folder that SGLang scores from as transformers does."""
    model = local_model(settings.model.path)
    if not needs_bias(model):
        return settings
    write_with_bias(model, directory)
    return settings.model_copy(update={"model": settings.model.model_copy(update={"path": str(directory)})})


async def _note(server: ServerHandle) -> None:
    log.info("frozen.state", server_id=server.id, fence=server.fence)
