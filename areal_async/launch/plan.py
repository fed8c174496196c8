"""Which processes a run has, who of them gets which GPUs, and with which environment each of them starts."""

import os
import secrets
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple, Self

from areal_async.config.settings import Settings
from areal_async.config.trainer import EngineSettings
from areal_async.errors import UserError
from areal_async.inference.card_share import CardShare
from areal_async.inference.commands import ALLOCATOR, nccl_environment
from areal_async.launch.backend import ProcessSpec
from areal_async.launch.blockages import excuse_for
from areal_async.launch.run_directory import RunDirectory
from areal_async.launch.supervisor import ProcessGroup
from areal_async.process.freed_memory import one_heap
from areal_async.process.host import LOOPBACK, PLACES, RENDEZVOUS, far_port, free_port
from areal_async.process.interpreter import module_command

NOWHERE: Mapping[str, str] = MappingProxyType({})
FIRST_NODE = "0"
"""The node that the launcher starts."""
TRAINER_STOP_S = 600.0
"""To finish a step and checkpoint."""
NODE_STOP_S = 60.0
"""To store what is finished and end its servers."""
CONTROLLER_STOP_S = 20.0
LEAST_PROCESS_BYTES = 200_000_000
"""What a rank or a server takes at the least for itself, without a model: torch is loaded in each."""
EXPANDABLE = "expandable_segments:True"
"""Rows differ in length: in segments of fixed sizes, freed memory stays too small for the next."""


def plan_groups(
    settings: Settings,
    directory: RunDirectory,
    *,
    gpus: tuple[str, ...],
    hosts: Sequence[str] = (LOOPBACK,),
    address: str = LOOPBACK,
    addresses: Mapping[str, str] = NOWHERE,
    absent: Container[str] = (),
    share: CardShare | None = None,
) -> list[ProcessGroup]:
    """Return the process groups of a run, in the order in which they are to be stopped.

    The controller is on the launcher's host; what the others have the settings say (``LaunchSettings``).

    Args:
        gpus: those of the first of them; the others are taken to have as many, and find out themselves which they are.
        hosts: those for ranks and nodes; the launcher's own first, where it is one of them.
        address: the launcher's host's, where ranks on all others find rank 0.
        addresses: where they find it on hosts that are not the launcher's, asked at each start of the ranks.
        absent: those of the hosts that are gone, asked at each start of the ranks.
        share: what a server may take of a GPU that the trainer has too.

    Raises:
        UserError: there are fewer hosts than are asked for; or GPUs, but not enough of them, or the two sides are to
            share those of one host and have several hosts.
    """
    places = _Places.of(settings, gpus=gpus, hosts=hosts)

    def trainer_specs() -> list[ProcessSpec]:
        base = role_spec(directory, "trainer", "trainer", num_threads=settings.trainer.num_threads, place=ANYWHERE)
        base = replace(base, environment={**base.environment, **nccl_environment(settings.inference)})
        chosen = places.of_ranks(absent)
        num_ranks = settings.trainer.ranks_per_host * len(chosen)
        return rank_specs(
            base, num_ranks, directory=directory.logs, places=chosen, address=address, addresses=addresses
        )

    def is_other_size(running: Sequence[str]) -> bool:
        return len(set(running)) < len(places.of_ranks(absent)) or any(host in absent for host in running)

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
            is_outdated=is_other_size if settings.trainer.elastic else None,
        ),
        *(
            node_group(
                settings,
                directory,
                node_id=str(index),
                place=place,
                work_done=work_done,
                share=share,
            )
            for index, place in enumerate(places.of_nodes, int(FIRST_NODE))
        ),
        ProcessGroup(
            name="controller",
            make_specs=lambda: [role_spec(directory, "controller", "controller", num_threads=1, place=NO_GPUS)],
            work_done=work_done,
            stop_deadline_s=CONTROLLER_STOP_S,
            ends_run=True,
        ),
    ]


def share_gpus(
    gpus: tuple[str, ...], *, num_inference: int, num_trainer: int, colocates: bool = False
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the GPUs of the node and those of the trainer: apart, or the first ones for both where it ``colocates``.

    Raises:
        UserError: there are fewer GPUs than they need; or none, and more processes than the memory holds.
    """
    if not gpus:
        _check_room(num_inference, num_trainer)
        return (), ()
    if num_trainer > len(gpus):
        raise UserError(
            f"trainer.num_ranks: got {num_trainer}, need at most {len(gpus)}, one per GPU; "
            "lower it, or set CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    if num_inference > len(gpus):
        raise UserError(
            "inference.num_servers x inference.tensor_parallel, and those of frozen policies: "
            f"got {num_inference} GPUs, need at most {len(gpus)}; "
            "lower one of them, or set CUDA_VISIBLE_DEVICES= to run on the CPU"
        )
    if colocates:
        return gpus[:num_inference], gpus[:num_trainer]
    if num_inference + num_trainer > len(gpus):
        raise UserError(
            f"inference.colocate: got none, with {num_inference} GPUs for servers and {num_trainer} for the trainer, "
            f"of which there are {len(gpus)}, need {num_inference + num_trainer}; set it to release or split to have "
            "both on the same GPUs, or lower inference.num_servers or trainer.num_ranks"
        )
    return gpus[:num_inference], gpus[num_inference : num_inference + num_trainer]


def _check_room(num_inference: int, num_trainer: int) -> None:
    """Refuse what would stop this host before it fails: where there are no GPUs, nothing else bounds the number."""
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // LEAST_PROCESS_BYTES
    if num_inference + num_trainer > most:
        by_size = {num_trainer: "trainer.num_ranks", num_inference: "inference.num_servers"}
        largest = max(by_size)
        raise UserError(
            f"{by_size[largest]}: got {largest} without GPUs, need at most {most} ranks and servers on a host, which "
            f"take {LEAST_PROCESS_BYTES / 1e6:.0f} MB of its memory each before any model; lower it"
        )


def places_of_ranks(trainer: EngineSettings, *, gpus: tuple[str, ...], hosts: Sequence[str]) -> "list[Place]":
    """Return a place for each host that has ranks, where there is nothing else.

    Raises:
        UserError: there are fewer hosts, or GPUs on one, than are asked for.
    """
    _check_num_hosts(trainer, hosts)
    _, trained = share_gpus(gpus, num_inference=0, num_trainer=trainer.ranks_per_host)
    others = [Place(host, None if trained else ()) for host in hosts[1 : trainer.num_hosts]]
    return [Place(hosts[0], trained), *others]


def _check_num_hosts(trainer: EngineSettings, hosts: Sequence[str]) -> None:
    if trainer.num_hosts > len(hosts):
        raise UserError(
            f"trainer.num_hosts: got {trainer.num_hosts}, need at most {len(hosts)}, as many as there are "
            f"({', '.join(hosts)}); lower it, or name more in launch.hosts, as the job's --nodes or by launch.num_hosts"
        )


class Place(NamedTuple):
    """Where a process is."""

    host: str | None
    """None is the launcher's."""
    gpus: Sequence[str] | None
    """None leaves it those that the host gives."""
    numbers: Sequence[int] = ()
    """Which of the latter it is to see, counted from 0; all of them where there are none."""

    @property
    def environment(self) -> dict[str, str]:
        """What tells a process of its GPUs."""
        if self.gpus is not None:
            return {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)}
        return {PLACES: ",".join(map(str, self.numbers))} if self.numbers else {}


ANYWHERE, NO_GPUS = Place(None, None), Place(None, ())


@dataclass(frozen=True, kw_only=True, slots=True)
class _Places:
    """Which host has ranks, and which a node."""

    hosts: Sequence[str]
    num_hosts: int
    """Hosts that have ranks."""
    gpus: Sequence[str]
    """All of the launcher's host."""
    served: Sequence[str]
    """GPUs of a node beside ranks; on a host of its own it takes what there is."""
    spare: Sequence[str]
    """GPUs that neither takes, for servers that are added."""
    trained: Sequence[str]
    """GPUs of the ranks on the launcher's host, and beside a node."""
    is_elastic: bool
    """Whether fewer hosts may have ranks while one is gone."""
    has_room: bool
    """Whether a host with a node has GPUs enough for ranks too."""

    @classmethod
    def of(cls, settings: Settings, *, gpus: tuple[str, ...], hosts: Sequence[str]) -> Self:
        trainer, colocate, num_inference = settings.trainer, settings.inference.colocate, settings.num_inference_gpus
        _check_num_hosts(trainer, hosts)
        if len(hosts) > 1 and colocate is not None:
            raise UserError(f"inference.colocate: got {colocate} with {len(hosts)} hosts, need one host; leave it out")
        is_apart = trainer.num_hosts < len(hosts)
        spare: tuple[str, ...] = ()
        if is_apart:
            served, _ = share_gpus(gpus, num_inference=num_inference, num_trainer=0)
            _, trained = share_gpus(gpus, num_inference=0, num_trainer=trainer.ranks_per_host)
        else:
            served, trained = share_gpus(
                gpus, num_inference=num_inference, num_trainer=trainer.ranks_per_host, colocates=colocate is not None
            )
            if colocate is None:
                spare = gpus[num_inference + trainer.ranks_per_host :]
        has_room = not gpus or num_inference + trainer.ranks_per_host <= len(gpus)
        return cls(
            hosts=hosts,
            num_hosts=trainer.num_hosts,
            gpus=gpus,
            served=served,
            spare=spare,
            trained=trained,
            is_elastic=trainer.elastic,
            has_room=has_room,
        )

    @property
    def of_nodes(self) -> list[Place]:
        """Hosts without ranks have one each; where there is none, every host does."""
        if others := self.hosts[self.num_hosts :]:
            return [Place(host, None) for host in others]
        return [self._place(host, (*self.served, *self.spare)) for host in self.hosts]

    def of_ranks(self, absent: Container[str]) -> list[Place]:
        """Return a place for each host that is to have ranks now: another one for what is gone, if one has room."""
        first, others = self.hosts[: self.num_hosts], self.hosts[self.num_hosts :]
        present = [host for host in (*first, *(others if self.has_room else ())) if host not in absent]
        awaited = [] if self.is_elastic else [host for host in first if host in absent]
        chosen = [*present, *awaited][: self.num_hosts]
        return [self._place_of_ranks(host) for host in chosen]

    def _place_of_ranks(self, host: str) -> Place:
        if len(self.hosts) == self.num_hosts:
            return self._place(host, self.trained)
        if host in self.hosts[self.num_hosts :]:  # beside a node, which takes the first ones
            num_served = len(self.served)
            return self._place(host, self.gpus[num_served : num_served + len(self.trained)])
        return self._place(host, self.trained) if host == self.hosts[0] or not self.trained else Place(host, None)

    def _place(self, host: str, gpus: Sequence[str]) -> Place:
        """Return a place with these of the first host's GPUs; none, where it has none: ranks compute alike."""
        if host == self.hosts[0] or not gpus:
            return Place(host, gpus)
        return Place(host, None, [self.gpus.index(gpu) for gpu in gpus])


def node_group(
    settings: Settings,
    directory: RunDirectory,
    *,
    node_id: str,
    place: "Place",
    work_done: Callable[[], int] | None = None,
    share: CardShare | None = None,
) -> ProcessGroup:
    """Return the process group of one node, which reads its settings and the broker's address from ``directory``."""
    name = f"node-{node_id}"
    num_threads = settings.inference.num_threads
    spec = role_spec(directory, name, "node", "--node-id", node_id, num_threads=num_threads, place=place)
    if share is not None:
        spec = replace(spec, environment={**spec.environment, **share.environment})
    return ProcessGroup(
        name=name,
        make_specs=lambda: [spec],
        work_done=work_done,
        stop_deadline_s=NODE_STOP_S,
        excuse=excuse_for(directory.path, node_id),
    )


def node_on_host(settings: Settings, directory: RunDirectory, node_id: str, host: str) -> ProcessGroup:
    """Return the process group of a node on one more host, where it has all GPUs."""
    place = Place(host, None)
    return node_group(settings, directory, node_id=node_id, place=place, work_done=lambda: directory.checkpointed_step)


def role_spec(
    directory: RunDirectory,
    name: str,
    *arguments: str,
    num_threads: int,
    place: "Place",
) -> ProcessSpec:
    """Return how a verb that is one process of a run is started."""
    return ProcessSpec(
        name=name,
        command=tuple(module_command("areal_async", *arguments, "--run-directory", str(directory.path))),
        environment={"OMP_NUM_THREADS": str(num_threads), **place.environment},
        host=place.host,
        output=directory.logs / f"{name}.out",
    )


def rank_specs(
    base: ProcessSpec,
    num_ranks: int,
    *,
    directory: Path,
    places: Sequence[Place],
    address: str = LOOPBACK,
    addresses: Mapping[str, str] = NOWHERE,
) -> list[ProcessSpec]:
    """Return one process per rank, which find each other as torchrun's would, on a port and by a name of their own.

    Args:
        places: a host's each; every one has as many ranks, the first one rank 0.
        address: where the launcher's host is reached from all of them.
        addresses: where those are that are not the launcher's.
    """
    far, per_host = addresses.get(places[0].host or LOOPBACK), num_ranks // len(places)
    port = free_port(setting="trainer", host=address) if far is None else far_port()
    shared = {
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(per_host),
        "MASTER_ADDR": far or address,
        "MASTER_PORT": str(port),
        RENDEZVOUS: secrets.token_hex(8),
        **one_heap(),  # with one for each thread it grew by 4.3 kB a step
    }
    specs = []
    for rank in range(num_ranks):
        place = places[rank // per_host]
        environment = {**base.environment, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank % per_host)}
        environment |= place.environment
        if place.gpus != () and not any(name in os.environ for name in ALLOCATOR):
            environment[ALLOCATOR[0]] = EXPANDABLE
        output = directory / f"{base.name}-{rank}.out"
        specs.append(replace(base, name=f"{base.name}-{rank}", environment=environment, host=place.host, output=output))
    return specs
