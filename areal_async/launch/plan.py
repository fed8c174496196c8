"""Which processes a run has, and with which environment each of them starts."""

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from areal_async.config.settings import Settings
from areal_async.errors import UserError
from areal_async.inference.card_share import CardShare
from areal_async.launch.backend import ProcessSpec
from areal_async.launch.blockages import excuse_for
from areal_async.launch.gpus import share_gpus
from areal_async.launch.run_directory import RunDirectory
from areal_async.launch.supervisor import ProcessGroup
from areal_async.process.host import LOOPBACK, free_port

FIRST_NODE = "0"
"""The node that the launcher starts."""
TRAINER_STOP_S = 600.0
"""To finish a step and checkpoint."""
NODE_STOP_S = 60.0
"""To store what is finished and end its servers."""
CONTROLLER_STOP_S = 20.0
ALLOCATOR = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where torch reads how its allocator of GPU memory works; the second name is the older one, and is read first."""
EXPANDABLE = "expandable_segments:True"
"""Rows differ in length: in segments of fixed sizes, freed memory stays too small for the next."""
ARENAS = "MALLOC_ARENA_MAX"
"""How many heaps glibc's allocator has. With one for each thread, what one frees lies idle while the next takes more: a
rank grew by 4.3 kB a step, and by nothing with a single one. Tensors are too large to come from any."""


def plan_groups(
    settings: Settings,
    directory: RunDirectory,
    *,
    gpus: tuple[str, ...],
    hosts: Sequence[str] = (LOOPBACK,),
    share: CardShare | None = None,
) -> list[ProcessGroup]:
    """Return the process groups of a run, in the order in which they are to be stopped.

    One host has everything. Of several, the first has the trainer and the controller, and each other one a node.

    Args:
        gpus: those of the first host; the others are taken to have as many, and find out themselves which they are.
        hosts: the launcher's own first.
        share: what a server may take of a GPU that the trainer has too.

    Raises:
        UserError: there are GPUs, but not enough of them, or the two sides are to share those of one host and have
            several hosts.
    """
    colocate = settings.inference.colocate
    num_inference, num_ranks = settings.num_inference_gpus, settings.trainer.num_ranks
    if others := hosts[1:]:
        if colocate is not None:
            raise UserError(
                f"inference.colocate: got {colocate} with {len(hosts)} hosts, of which the first trains and the others "
                "serve, need one host; leave it out"
            )
        share_gpus(gpus, num_inference=num_inference, num_trainer=0)
        _, trainer_gpus = share_gpus(gpus, num_inference=0, num_trainer=num_ranks)
        places: list[tuple[str | None, Sequence[str] | None]] = [(host, None) for host in others]
    else:
        node_gpus, trainer_gpus = share_gpus(
            gpus, num_inference=num_inference, num_trainer=num_ranks, colocates=colocate is not None
        )
        places = [(None, node_gpus)]

    def trainer_specs() -> list[ProcessSpec]:
        base = role_spec(directory, "trainer", "trainer", num_threads=settings.trainer.num_threads, gpus=trainer_gpus)
        return rank_specs(base, num_ranks, directory=directory.logs)

    def work_done() -> int:
        return directory.checkpointed_step

    return [
        ProcessGroup(
            name="trainer",
            make_specs=trainer_specs,
            max_restarts=settings.trainer.max_restarts,
            restart_window_s=None,
            work_done=work_done,
            stop_deadline_s=TRAINER_STOP_S,
            may_finish=True,
        ),
        *(
            node_group(
                settings, directory, node_id=str(index), gpus=node_gpus, host=host, work_done=work_done, share=share
            )
            for index, (host, node_gpus) in enumerate(places, int(FIRST_NODE))
        ),
        ProcessGroup(
            name="controller",
            make_specs=lambda: [role_spec(directory, "controller", "controller", num_threads=1, gpus=())],
            work_done=work_done,
            stop_deadline_s=CONTROLLER_STOP_S,
            ends_run=True,
        ),
    ]


def node_group(
    settings: Settings,
    directory: RunDirectory,
    *,
    node_id: str,
    gpus: Sequence[str] | None,
    host: str | None = None,
    work_done: Callable[[], int] | None = None,
    share: CardShare | None = None,
) -> ProcessGroup:
    """Return the process group of one node, which reads its settings and the broker's address from ``directory``."""
    name = f"node-{node_id}"
    num_threads = settings.inference.num_threads
    spec = role_spec(directory, name, "node", "--node-id", node_id, num_threads=num_threads, gpus=gpus, host=host)
    if share is not None:
        spec = replace(spec, environment={**spec.environment, **share.environment})
    return ProcessGroup(
        name=name,
        make_specs=lambda: [spec],
        work_done=work_done,
        stop_deadline_s=NODE_STOP_S,
        excuse=excuse_for(directory.path, node_id),
    )


def role_spec(
    directory: RunDirectory,
    name: str,
    *arguments: str,
    num_threads: int,
    gpus: Sequence[str] | None,
    host: str | None = None,
) -> ProcessSpec:
    """Return how a verb that is one process of a run is started; ``gpus`` None leaves it those of its host."""
    chosen = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    return ProcessSpec(
        name=name,
        command=(sys.executable, "-m", "areal_async", *arguments, "--run-directory", str(directory.path)),
        environment={"OMP_NUM_THREADS": str(num_threads), **chosen},
        host=host,
        output=directory.logs / f"{name}.out",
    )


def rank_specs(base: ProcessSpec, num_ranks: int, *, directory: Path) -> list[ProcessSpec]:
    """Return one process per rank, which find each other as torchrun's would, on a port of their own."""
    port = free_port(setting="trainer")
    is_tuned = not base.environment.get("CUDA_VISIBLE_DEVICES") or any(name in os.environ for name in ALLOCATOR)
    allocator = {} if is_tuned else {ALLOCATOR[0]: EXPANDABLE}
    return [
        ProcessSpec(
            name=f"{base.name}-{rank}",
            command=base.command,
            environment={
                **base.environment,
                **allocator,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(num_ranks),
                "LOCAL_WORLD_SIZE": str(num_ranks),
                "MASTER_ADDR": LOOPBACK,
                "MASTER_PORT": str(port),
                ARENAS: os.environ.get(ARENAS, "1"),
            },
            output=directory / f"{base.name}-{rank}.out",
        )
        for rank in range(num_ranks)
    ]
