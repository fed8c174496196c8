"""Settings explain themselves, refuse nonsense, and every file in configs/ is one that parses."""

import inspect
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from areal_async.config import tree
from areal_async.config.launch import LaunchSettings
from areal_async.config.reward_model import RewardModelSettings
from areal_async.config.settings import Settings, TrainerSettings
from areal_async.config.sft import SftSettings, SftTrainerSettings
from areal_async.config.sources import load_kind
from areal_async.config.tree import annotation_at, describe, leaves

ROOT = Path(__file__).parents[3]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("kind", [Settings, SftSettings, RewardModelSettings])
def test_every_setting_has_a_sentence(kind: type[BaseModel]) -> None:
    silent = [info.name for info in describe(kind) if not info.sentence]

    assert silent == []


@pytest.mark.parametrize("kind", [Settings, SftSettings, RewardModelSettings])
def test_every_section_is_frozen_and_refuses_unknown_keys(kind: type[BaseModel]) -> None:
    for owner in {owner for _, owner in leaves(kind)} | {kind}:
        assert owner.model_config.get("frozen") is True
        assert owner.model_config.get("extra") == "forbid"


def test_described_settings_are_exactly_those_that_can_be_set() -> None:
    names = [info.name for info in describe(Settings)]

    assert len(names) == len(set(names))
    assert all(annotation_at(Settings, name.split(".")) is not None for name in names)
    assert {"run.name", "tasks.0.dataset.path", "rollout.sampling.temperature", "bus.url"} <= set(names)


@pytest.mark.parametrize("raised", [OSError, TypeError, IndentationError])
def test_where_the_sources_are_not_installed_settings_are_described_without_sentences(
    monkeypatch: pytest.MonkeyPatch, raised: type[Exception]
) -> None:
    def without_sources(_: object) -> str:
        raise raised

    tree._sentences.cache_clear()
    monkeypatch.setattr(inspect, "getsource", without_sources)
    infos = describe(Settings)
    tree._sentences.cache_clear()

    assert {info.sentence for info in infos} == {""}


def test_defaults_are_described_as_they_are_written_in_a_file() -> None:
    defaults = {info.name: info.default for info in describe(Settings)}

    assert defaults["rollout.max_staleness"] == "2"
    assert defaults["inference.python"] == "null"
    assert defaults["trainer.activation_checkpointing"] == "false"
    assert defaults["trainer.betas"] == "[0.9, 0.95]"
    assert defaults["tasks.0.dataset.path"] == "null"


def kind_of(path: Path) -> type[BaseModel]:
    if path.stem.startswith("sft"):
        return SftSettings
    return RewardModelSettings if path.stem.startswith("reward_model") else Settings


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_file_in_configs_parses(path: Path) -> None:
    settings = load_kind(kind_of(path), path, use_environment=False)

    # Those of all environments leave the name to the one that is run.
    assert settings.model_dump()["run"]["name"] == ("run" if path.stem.startswith("environment") else path.stem)


@pytest.mark.parametrize("stem", ["gsm8k"])
def test_each_workflow_has_settings_for_both_kinds_of_machine(stem: str) -> None:
    assert {f"{stem}.yaml", f"{stem}_cpu.yaml"} <= {path.name for path in CONFIGS}


def test_what_is_set_for_a_critic_or_a_reference_needs_one() -> None:
    trainer = {"critic": {"lr": 1e-5}}

    with pytest.raises(ValueError, match=r"trainer.critic.lr: got 1e-05 with .*grpo, kl_coef=0, which has no critic"):
        Settings.model_validate({"trainer": trainer})
    assert (
        Settings.model_validate({"trainer": trainer, "algorithm": {"name": "ppo"}}).trainer.for_role("critic").lr
        == 1e-5
    )
    layout = {"reference": {"tensor_parallel": 1}}
    with pytest.raises(
        ValueError, match=r"trainer.reference.tensor_parallel: got 1 .* no reference; .* kl_coef over 0"
    ):
        Settings.model_validate({"trainer": layout})
    assert Settings.model_validate({"trainer": layout, "algorithm": {"kl_coef": 0.1}}).algorithm.kl_coef == 0.1
    # As a resolved file has it.
    unset = Settings.model_validate({"trainer": {"critic": {"lr": None}}})
    assert unset == Settings.model_validate(unset.model_dump(mode="json"))


def test_copies_on_disk_may_be_rare_where_weights_are_broadcast_alone() -> None:
    def interval(**inference: Any) -> int:
        return Settings.model_validate({"inference": inference}).inference.disk_interval

    assert (interval(), interval(weight_transfer="distributed")) == (1, 10)
    assert interval(weight_transfer="distributed", disk_every=4) == 4
    with pytest.raises(ValidationError, match="disk_every: got 4 with weight_transfer=disk, need 1.*; set it to 1"):
        interval(disk_every=4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"trainer": {"num_ranks": 2, "tensor_parallel": 2}}, "lora.rank: got 8 with tensor_parallel=2, need"),
        ({"trainer": {"num_ranks": 2, "pipeline_parallel": 2}}, "lora.rank: got 8 with pipeline_parallel=2, need"),
        ({"inference": {"weight_transfer": "distributed"}}, "got adapter with inference.weight_transfer=distributed"),
        ({"inference": {"backend": "sglang"}}, "got adapter with inference.backend=sglang, need merged or auto"),
    ],
)
def test_what_is_not_done_with_adapters_is_refused(given: dict[str, Any], message: str) -> None:
    lora = {"rank": 8, "transfer": "adapter"}
    off = {**lora, "rank": 0}

    Settings.model_validate({**given, "trainer": {**given.get("trainer", {}), "lora": off}})
    with pytest.raises(ValidationError, match=message):
        Settings.model_validate({**given, "trainer": {**given.get("trainer", {}), "lora": lora}})


def test_adapters_of_a_tower_without_a_rank_are_refused() -> None:
    given = {"vision": "lora", "lora": {"rank": 4}}
    assert Settings.model_validate({"trainer": given}).trainer.vision == "lora"
    assert SftTrainerSettings.model_validate(given).engine.vision == "lora"
    for section in (TrainerSettings, SftTrainerSettings):
        with pytest.raises(
            ValidationError, match=r"vision: got lora with lora\.rank=0, need the rank of its adapters; "
        ):
            section.model_validate({"vision": "lora"})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"colocate": "release", "interrupt": "in_place"}, "interrupt: got in_place with colocate=release, need retr"),
        ({"colocate": "release", "interrupt": "abort"}, "interrupt: got abort with colocate=release, need retract"),
        ({"colocate": "split", "weight_transfer": "distributed"}, "got distributed with colocate=split, need disk"),
    ],
)
def test_what_cannot_be_on_one_gpu_is_refused(given: dict[str, Any], message: str) -> None:
    Settings.model_validate({"inference": {**given, "colocate": None}})
    with pytest.raises(ValidationError, match=message):
        Settings.model_validate({"inference": given})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"num_ranks": 3, "num_hosts": 2}, "num_hosts: got 2 with num_ranks=3, need as many ranks on each host"),
        (
            {"num_ranks": 4, "num_hosts": 4, "tensor_parallel": 2},
            "num_hosts: got 4 with num_ranks=4 and tensor_parallel=2, need its groups within one host, of 1 ranks",
        ),
        (
            {"num_ranks": 4, "num_hosts": 4, "reference": {"tensor_parallel": 2}},
            "num_hosts: got 4 with num_ranks=4 and reference.tensor_parallel=2, need its groups within one host",
        ),
    ],
)
def test_ranks_that_cannot_be_spread_over_hosts_are_refused(given: dict[str, Any], message: str) -> None:
    TrainerSettings.model_validate({**given, "num_ranks": 4, "num_hosts": 2})
    with pytest.raises(ValidationError, match=message):
        TrainerSettings.model_validate(given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"backend": "slurm"}, "hosts: got a, b with backend=slurm, which has hosts of its own, need local"),
        ({"hosts": [], "num_hosts": 2}, "num_hosts: got 2 with backend=local, need ray"),
        ({"hosts": ["a", "a"]}, "need a different name for each"),
        ({"hosts": ["127.0.0.1"]}, "need a different name for each, and none for the launcher's own"),
        ({"hosts": [""]}, "hosts: got '', need the name or address of a host"),
        ({"hosts": ["a b"]}, "hosts: got 'a b', need the name or address of a host"),
        ({"hosts": ["a'b"]}, "need the name or address of a host"),
        ({"hosts": ["-oProxyCommand=id"]}, "hosts: got '-oProxyCommand=id', need the name or address of a host"),
        ({"hosts": ["a\x00"]}, "need the name or address of a host"),
        ({"remote_command": "ssh {name}"}, "remote_command: got 'ssh {name}', need a command with {host} in it"),
        ({"remote_command": "ssh {host.name}"}, "need a command with {host} in it"),
        ({"remote_command": "ssh {host:>99999999999}"}, "need a command with {host} in it"),
        ({"remote_command": "ssh '{host}"}, "remote_command: got .* [(]No closing quotation[)], need words"),
        ({"remote_command": "ssh \x00{host}"}, "need a command with {host} in it"),
        ({"remote_command": " "}, "remote_command: got ' ', need a command"),
    ],
)
def test_hosts_that_cannot_be_had_are_refused(given: dict[str, Any], message: str) -> None:
    usual = {"hosts": ["a", "b"]}
    Settings.model_validate({"launch": usual})
    with pytest.raises(ValidationError, match=message):
        Settings.model_validate({"launch": usual | given})


def test_a_hosts_name_is_put_in_the_place_of_its_mark_alone() -> None:
    launch = LaunchSettings(hosts=("u@h-1", "::1"), remote_command="sh -c 'echo ${HOME}; exec ssh {host}' {host}")

    assert [launch.words_for(host) for host in launch.hosts] == [
        ["sh", "-c", f"echo ${{HOME}}; exec ssh {host}", host] for host in launch.hosts
    ]


def test_servers_of_another_model_share_no_gpu_with_the_trainer() -> None:
    policies = {"judge": {"path": "org/judge"}}

    Settings.model_validate({"inference": {"colocate": "release"}, "policies": {"judge": {}}})
    with pytest.raises(ValidationError, match="policies.judge.path: got a model of its own with inference.colocate"):
        Settings.model_validate({"inference": {"colocate": "release"}, "policies": policies})


def test_fewer_hosts_of_an_elastic_trainer_have_as_many_ranks_and_replicas_each_as_all_of_them() -> None:
    trainer = TrainerSettings(
        num_ranks=32, num_hosts=4, replicas=8, tensor_parallel=2, elastic=True, reference={"replicas": 4}
    )

    fewer = trainer.on_hosts(3)

    assert (fewer.num_ranks, fewer.num_hosts, fewer.replicas, fewer.tensor_parallel) == (24, 3, 6, 2)
    assert (fewer.reference.replicas, fewer.critic.replicas) == (3, None)
    assert TrainerSettings.model_validate(fewer.model_dump()) == fewer, "a layout of its own right"
    for given, found in (({"replicas": 1}, "replicas=1"), ({"critic": {"replicas": 1}}, "critic.replicas=1")):
        with pytest.raises(
            ValidationError, match=f"elastic: got true with num_hosts=2 and {found}, need several hosts"
        ):
            TrainerSettings.model_validate({"num_ranks": 4, "num_hosts": 2, "replicas": 2, "elastic": True} | given)
