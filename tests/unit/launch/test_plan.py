"""Who is started, with which GPUs and threads, and how the ranks find each other."""

import re
from pathlib import Path
from typing import Any

import pytest

from areal_async.config.settings import InferenceSettings, PolicySettings, Settings, TrainerSettings
from areal_async.errors import UserError
from areal_async.inference.commands import server_command
from areal_async.launch.backend import ProcessSpec
from areal_async.launch.plan import plan_groups, share_gpus
from areal_async.launch.run_directory import RunDirectory
from areal_async.process.host import PLACES

FOUR = ("0", "1", "2", "3")


@pytest.mark.parametrize(
    ("gpus", "num_inference", "num_trainer", "colocates", "shared"),
    [
        (FOUR, 2, 2, False, (("0", "1"), ("2", "3"))),
        (FOUR, 1, 2, False, (("0",), ("1", "2"))),
        (FOUR, 3, 2, True, (("0", "1", "2"), ("0", "1"))),
        (FOUR, 1, 2, True, (("0",), ("0", "1"))),
        (("7",), 1, 1, True, (("7",), ("7",))),
        ((), 4, 4, False, ((), ())),
        ((), 1, 1, True, ((), ())),
    ],
)
def test_node_and_trainer_have_gpus_of_their_own_unless_they_are_to_share_them(
    gpus: tuple[str, ...],
    num_inference: int,
    num_trainer: int,
    colocates: bool,
    shared: tuple[tuple[str, ...], tuple[str, ...]],
) -> None:
    assert share_gpus(gpus, num_inference=num_inference, num_trainer=num_trainer, colocates=colocates) == shared


def test_gpus_are_shared_only_where_the_settings_say_so() -> None:
    """SGLang alone takes most of a card: both there unasked end out of memory."""
    with pytest.raises(UserError, match="colocate: got none, with 3 GPUs for servers and 2 for the trainer.*need 5"):
        share_gpus(FOUR, num_inference=3, num_trainer=2)


def test_servers_of_other_hosts_share_no_gpus_with_the_trainer(tmp_path: Path) -> None:
    settings = Settings(inference=InferenceSettings(colocate="release"))
    with pytest.raises(UserError, match="colocate: got release with 2 hosts"):
        plan_groups(settings, RunDirectory(tmp_path), gpus=FOUR, hosts=("a", "b"))


def test_more_ranks_or_servers_than_gpus_are_refused() -> None:
    with pytest.raises(UserError, match="trainer.num_ranks: got 5, need at most 4"):
        share_gpus(FOUR, num_inference=1, num_trainer=5)
    with pytest.raises(UserError, match="got 5 GPUs, need at most 4"):
        share_gpus(FOUR, num_inference=5, num_trainer=1)


@pytest.mark.parametrize(
    ("num_inference", "num_trainer", "setting"),
    [(1, 10**6, "trainer.num_ranks"), (10**6, 1, "inference.num_servers"), (10**6, 0, "inference.num_servers")],
)
def test_more_processes_than_the_memory_holds_are_refused_where_no_gpus_bound_them(
    num_inference: int, num_trainer: int, setting: str
) -> None:
    """A thousand ranks stop a machine long before one of them fails."""
    with pytest.raises(UserError, match=rf"^{setting}: got 1000000 without GPUs, need at most \d+ "):
        share_gpus((), num_inference=num_inference, num_trainer=num_trainer)


def test_process_groups_are_planned_in_the_order_in_which_they_are_stopped(tmp_path: Path) -> None:
    groups = plan_groups(Settings(), RunDirectory(tmp_path), gpus=())

    assert [group.name for group in groups] == ["trainer", "node-0", "controller"]
    assert [group.ends_run for group in groups] == [False, False, True]
    assert [group.may_finish for group in groups] == [True, False, False]


def test_ranks_find_each_other_as_torchruns_would(tmp_path: Path) -> None:
    settings = Settings(trainer=TrainerSettings(num_ranks=2, num_threads=3), inference=InferenceSettings(num_threads=2))
    trainer, node, controller = plan_groups(settings, RunDirectory(tmp_path), gpus=FOUR)

    first, second = trainer.make_specs()

    assert (first.name, second.name) == ("trainer-0", "trainer-1")
    for rank, spec in enumerate((first, second)):
        assert spec.environment["RANK"] == spec.environment["LOCAL_RANK"] == str(rank)
        assert spec.environment["WORLD_SIZE"] == "2"
        assert spec.environment["MASTER_ADDR"] == "127.0.0.1"
        assert spec.environment["OMP_NUM_THREADS"] == "3"
        assert spec.environment["CUDA_VISIBLE_DEVICES"] == "1,2"
        assert spec.output == tmp_path / "logs" / f"trainer-{rank}.out"
    assert first.environment["MASTER_PORT"] == second.environment["MASTER_PORT"]
    assert re.fullmatch(r"\d+", first.environment["MASTER_PORT"])
    assert first.environment["RENDEZVOUS_ID"] == second.environment["RENDEZVOUS_ID"]
    again, _ = trainer.make_specs()  # of which those of before are to hear nothing
    for name in ("MASTER_PORT", "RENDEZVOUS_ID"):
        assert again.environment[name] != first.environment[name]
    # Those that nobody has are the node's, for servers that are added.
    assert node.make_specs()[0].environment == {"OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "0,3"}
    assert controller.make_specs()[0].environment["CUDA_VISIBLE_DEVICES"] == ""


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_ranks_on_gpus_have_memory_that_grows_unless_the_user_says_how_it_is_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF", raising=False)

    def chosen(gpus: tuple[str, ...]) -> str | None:
        trainer, *_ = plan_groups(Settings(), RunDirectory(tmp_path), gpus=gpus)
        (rank,) = trainer.make_specs()
        return rank.environment.get("PYTORCH_ALLOC_CONF")

    assert (chosen(FOUR), chosen(())) == ("expandable_segments:True", None)
    monkeypatch.setenv(name, "backend:cudaMallocAsync")
    assert chosen(FOUR) is None


@pytest.mark.parametrize(
    ("given", "flags", "taken"),
    [(None, (), "0"), ("1", (), "1"), (None, ("--enable-symm-mem",), "1"), ("0", ("--enable-symm-mem",), "1")],
)
def test_nccl_reaches_memory_alike_on_both_sides_of_a_broadcast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, flags: tuple[str, ...], taken: str
) -> None:
    """SGLang changes what its own nccl does, unless that is said, and then a rank's cannot open the memory of it."""
    monkeypatch.delenv("NCCL_CUMEM_ENABLE", raising=False)
    if given is not None:
        monkeypatch.setenv("NCCL_CUMEM_ENABLE", given)

    def chosen(transfer: str) -> set[str | None]:
        inference = InferenceSettings.model_validate({"weight_transfer": transfer, "flags": flags, "backend": "sglang"})
        settings = Settings(inference=inference)
        trainer, *_ = plan_groups(settings, RunDirectory(tmp_path), gpus=FOUR)
        sides = (trainer.make_specs()[0], server_command(settings, server_id="a", index=0))
        return {side.environment.get("NCCL_CUMEM_ENABLE") for side in sides}

    assert chosen("distributed") == {taken}
    assert chosen("disk") == {None}


@pytest.mark.parametrize(("given", "taken"), [(None, "1"), ("4", "4")])
def test_a_rank_has_one_heap_for_all_its_threads_or_as_many_as_the_environment_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str | None, taken: str
) -> None:
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    if given is not None:
        monkeypatch.setenv("MALLOC_ARENA_MAX", given)
    trainer, *_ = plan_groups(Settings(), RunDirectory(tmp_path), gpus=())

    assert [spec.environment["MALLOC_ARENA_MAX"] for spec in trainer.make_specs()] == [taken]


def test_of_several_hosts_the_first_trains_with_all_its_gpus_and_the_others_generate(tmp_path: Path) -> None:
    settings = Settings(trainer=TrainerSettings(num_ranks=4), inference=InferenceSettings(num_servers=4))
    hosts = ("a", "b", "c")

    trainer, *nodes, controller = plan_groups(settings, RunDirectory(tmp_path), gpus=FOUR, hosts=hosts)

    assert trainer.make_specs()[0].environment["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert [(spec.name, spec.host) for group in nodes for spec in group.make_specs()] == [
        ("node-0", "b"),
        ("node-1", "c"),
    ]
    assert {spec.host for group in (trainer, controller) for spec in group.make_specs()} == {"a", None}
    # Which GPUs another host gives away is known there alone.
    assert all("CUDA_VISIBLE_DEVICES" not in spec.environment for group in nodes for spec in group.make_specs())
    with pytest.raises(UserError, match="got 4 GPUs, need at most 3"):
        plan_groups(settings, RunDirectory(tmp_path), gpus=FOUR[:3], hosts=hosts)


def _gpus_of(spec: ProcessSpec) -> tuple[str | None, str | None]:
    """Return which it is to see, by their names and by their places among its host's."""
    return spec.environment.get("CUDA_VISIBLE_DEVICES"), spec.environment.get(PLACES)


def _hosts_of_ranks(settings: Settings, directory: Path, hosts: tuple[str, ...], **keywords: Any) -> list[Any]:
    trainer, *_ = plan_groups(settings, RunDirectory(directory), hosts=hosts, **keywords)
    taken = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "CUDA_VISIBLE_DEVICES")
    return [(spec.host, *(spec.environment.get(name) for name in taken)) for spec in trainer.make_specs()]


def test_ranks_are_spread_over_the_first_hosts_and_the_others_generate(tmp_path: Path) -> None:
    settings = Settings(trainer=TrainerSettings(num_ranks=4, num_hosts=2))
    hosts = ("a", "b", "c")

    _, *nodes, _ = plan_groups(settings, RunDirectory(tmp_path), gpus=FOUR, hosts=hosts)

    assert _hosts_of_ranks(settings, tmp_path, hosts, gpus=FOUR, address="127.0.0.2") == [
        ("a", "0", "0", "2", "127.0.0.2", "0,1"),
        ("a", "1", "1", "2", "127.0.0.2", "0,1"),
        ("b", "2", "0", "2", "127.0.0.2", None),  # which GPUs it gives away is known there alone
        ("b", "3", "1", "2", "127.0.0.2", None),
    ]
    assert [spec.host for group in nodes for spec in group.make_specs()] == ["c"]


def test_ranks_find_the_first_of_them_where_it_is_and_not_at_the_launcher(tmp_path: Path) -> None:
    settings, addresses = Settings(trainer=TrainerSettings(num_ranks=2, num_hosts=2)), {"a": "10.0.0.1"}
    hosts, gone = ("a", "b", "c"), set[str]()
    groups = plan_groups(
        settings, RunDirectory(tmp_path), gpus=(), hosts=hosts, addresses=addresses, absent=gone
    )  # fmt: skip

    def found() -> set[str]:
        return {spec.environment["MASTER_ADDR"] for spec in groups[0].make_specs()}

    assert found() == {"10.0.0.1"}
    addresses |= {"b": "10.0.0.2", "c": "10.0.0.3"}
    gone.add("a")
    assert found() == {"10.0.0.2"}
    assert [spec.host for spec in groups[0].make_specs()] == ["b", "c"]


def test_where_no_host_is_left_over_each_shares_its_gpus_between_its_node_and_its_ranks(tmp_path: Path) -> None:
    settings = Settings(trainer=TrainerSettings(num_ranks=4, num_hosts=2))

    gpus = ("GPU-a", "GPU-b", "GPU-c", "GPU-d")
    trainer, *nodes, _ = plan_groups(settings, RunDirectory(tmp_path), gpus=gpus, hosts=("a", "b"))

    trainer_and_nodes = [spec for group in (trainer, *nodes) for spec in group.make_specs()]
    assert [(spec.name, spec.host, *_gpus_of(spec)) for spec in trainer_and_nodes] == [
        ("trainer-0", "a", "GPU-b,GPU-c", None),
        ("trainer-1", "a", "GPU-b,GPU-c", None),
        ("trainer-2", "b", None, "1,2"),  # what they are called is known there alone
        ("trainer-3", "b", None, "1,2"),
        ("node-0", "a", "GPU-a,GPU-d", None),
        ("node-1", "b", None, "0,3"),
    ]
    specs = [
        spec
        for group in plan_groups(settings, RunDirectory(tmp_path), gpus=(), hosts=("a", "b"))
        for spec in group.make_specs()
    ]
    assert [_gpus_of(spec) for spec in specs] == [("", None)] * len(specs), "without any, none has some"


@pytest.mark.parametrize(
    ("gpus", "absent", "chosen"),
    [
        (FOUR, (), ["a", "b"]),
        (FOUR, ("b",), ["a", "c"]),  # beside its node
        (FOUR[:3], ("b",), ["a", "b"]),  # no other has GPUs enough for both: it is waited for
        ((), ("b", "c"), ["a", "d"]),
        ((), ("b", "c", "d"), ["a", "b"]),
    ],
)
def test_a_host_that_is_gone_is_left_out_where_another_one_has_room(
    tmp_path: Path, gpus: tuple[str, ...], absent: tuple[str, ...], chosen: list[str]
) -> None:
    settings = Settings(trainer=TrainerSettings(num_ranks=4, num_hosts=2), inference=InferenceSettings(num_servers=2))
    trainer, *_ = plan_groups(settings, RunDirectory(tmp_path), hosts=("a", "b", "c", "d"), gpus=gpus, absent=absent)
    ranks = trainer.make_specs()

    assert [spec.host for spec in ranks[::2]] == chosen
    assert [_gpus_of(spec) for spec in ranks if spec.host == "c"] == [(None, "2,3")] * 2 * ("c" in chosen)


def test_an_elastic_trainer_begins_on_the_hosts_that_are_there_and_anew_once_they_are_others(tmp_path: Path) -> None:
    trainer = TrainerSettings(num_ranks=8, num_hosts=4, replicas=4, elastic=True)
    hosts, absent = ("a", "b", "c", "d"), {"b", "d"}
    group, *_ = plan_groups(Settings(trainer=trainer), RunDirectory(tmp_path), gpus=(), hosts=hosts, absent=absent)

    specs = group.make_specs()

    assert [(one.host, one.environment["RANK"]) for one in specs[::2]] == [("a", "0"), ("c", "2")]
    assert {(one.environment["WORLD_SIZE"], one.environment["LOCAL_WORLD_SIZE"]) for one in specs} == {("4", "2")}
    assert group.is_outdated is not None
    running = ["a", "a", "c", "c"]
    assert not group.is_outdated(running)
    absent.remove("b")
    assert group.is_outdated(running), "one is back"
    absent |= {"b", "c"}
    assert group.is_outdated(running), "one is to have no ranks any more"


def test_more_hosts_than_there_are_are_refused(tmp_path: Path) -> None:
    settings = Settings(trainer=TrainerSettings(num_ranks=4, num_hosts=4))
    with pytest.raises(UserError, match=r"trainer.num_hosts: got 4, need at most 2, as many as there are \(a, b\)"):
        plan_groups(settings, RunDirectory(tmp_path), gpus=(), hosts=("a", "b"))


def test_frozen_policies_have_gpus_of_their_own(tmp_path: Path) -> None:
    settings = Settings(
        policies={
            "opponent": PolicySettings(),
            "judge": PolicySettings(path="org/judge", num_servers=2),
            "critic": PolicySettings(path="org/critic"),
        }
    )

    trainer, node, _ = plan_groups(settings, RunDirectory(tmp_path), gpus=(*FOUR, "4"))

    assert node.make_specs()[0].environment["CUDA_VISIBLE_DEVICES"] == "0,1,2,3"
    assert trainer.make_specs()[0].environment["CUDA_VISIBLE_DEVICES"] == "4"
    with pytest.raises(UserError, match="those of frozen policies: got 4 GPUs, need at most 3"):
        plan_groups(settings, RunDirectory(tmp_path), gpus=FOUR[:3])


def test_roles_are_told_where_the_run_is(tmp_path: Path) -> None:
    for group in plan_groups(Settings(), RunDirectory(tmp_path), gpus=()):
        for spec in group.make_specs():
            assert spec.command[1:3] == ("-m", "areal_async")
            assert spec.command[-2:] == ("--run-directory", str(tmp_path))
