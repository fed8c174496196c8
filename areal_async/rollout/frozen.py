"""The frozen models of a node: each a fleet of its own, beside the one that holds the weights under training.

Nobody but the node knows of these servers: they stand in no key that says what the servers of the run hold, so the
trainer waits for none of them and no credit depends on them. A crash of one is fenced and restarted as ever.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio
import anyio.to_thread
import structlog

from areal_async.config.settings import PolicySettings, Settings
from areal_async.inference.client import InferenceClient
from areal_async.inference.commands import choose_backend
from areal_async.inference.pool import ServerHandle
from areal_async.inference.score_bias import needs_bias, write_with_bias
from areal_async.inference.scoring import ScoringClient
from areal_async.inference.supervision.fleet import Fleet
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
    """Have the servers of all frozen policies run for as long as the block does.

    Raises:
        UserError: a model is not there, or its server cannot even start.
        PipelineError: a server fails again and again; possibly inside an ExceptionGroup.
    """
    first_gpu = settings.inference.num_gpus
    models: dict[str, FrozenModel | FrozenReward] = {}
    async with AsyncExitStack() as served:
        for name, policy in settings.frozen_policies.items():
            place = FrozenPlace(node_id=node_id, log_directory=log_directory, name=name, first_gpu=first_gpu)
            models[name] = await served.enter_async_context(serve_model(policy, settings, place, max_streams))
            first_gpu += policy.num_servers * policy.tensor_parallel
        yield models


@dataclass(frozen=True, kw_only=True, slots=True)
class FrozenPlace:
    """Where a frozen model's servers run, and under which name."""

    node_id: str
    log_directory: Path
    name: str
    """Part of its servers' ids."""
    first_gpu: int
    """Position of its first GPU among those of the node."""
    setting: str = ""
    """What names it in messages; empty for the policy of its name."""


@asynccontextmanager
async def serve_model(
    policy: PolicySettings, settings: Settings, place: FrozenPlace, max_streams: int
) -> AsyncIterator[FrozenModel | FrozenReward]:
    """Have the servers of one frozen model run for as long as the block does.

    Raises:
        UserError: the model is not there, or its server cannot even start.
        PipelineError: a server fails again and again; possibly inside an ExceptionGroup.
    """
    own = settings_of(policy, settings)
    async with AsyncExitStack() as clients:
        if policy.is_reward and choose_backend(own.inference) == "sglang":
            folder = clients.enter_context(TemporaryDirectory(prefix="areal_reward_"))
            own = await anyio.to_thread.run_sync(_with_bias, own, Path(folder))
        fleet = Fleet(
            own,
            node_id=place.node_id,
            log_directory=place.log_directory,
            publish=_note,
            frozen=place.name,
            first_gpu=place.first_gpu,
        )
        async with anyio.create_task_group() as services:
            services.start_soon(fleet.run)
            codec = await anyio.to_thread.run_sync(_load_codec, place.setting or f"policies.{place.name}", policy)
            if policy.is_reward:
                scorer = ScoringClient(fleet.pool, own.inference, max_requests=max_streams, vocab_size=codec.vocab_size)
                async with scorer:
                    yield FrozenReward(scorer=scorer, codec=codec, pool=fleet.pool)
            else:
                client = InferenceClient(
                    fleet.pool,
                    own.inference,
                    max_streams=max_streams,
                    vocab_size=codec.vocab_size,
                    model=own.model.path,
                    vision=codec.vision,
                )
                async with client:
                    yield FrozenModel(generator=client, codec=codec, pool=fleet.pool, call_parser=client.call_parser)
            services.cancel_scope.cancel()


def _load_codec(own: str, policy: PolicySettings) -> TextCodec:
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
