"""What a server may take of a GPU that the trainer has too reaches its command line, and nobody else's."""

from pathlib import Path

import pytest

from areal_async.config.settings import InferenceSettings, Settings
from areal_async.inference.card_share import VARIABLE, CardShare
from areal_async.inference.commands import ServerCommand, server_command
from areal_async.launch.plan import plan_groups
from areal_async.launch.run_directory import RunDirectory

SHARE = CardShare(fraction=0.4375, cache_tokens=123_456)


def _server(backend: str, colocate: str | None, **inference: object) -> ServerCommand:
    chosen = InferenceSettings.model_validate({"backend": backend, "colocate": colocate, **inference})
    return server_command(Settings(inference=chosen), server_id="0-0", index=0)


def _command(backend: str, colocate: str | None) -> tuple[str, ...]:
    return _server(backend, colocate).arguments


def _has(arguments: tuple[str, ...], *flags: str) -> bool:
    return any(arguments[at : at + len(flags)] == flags for at in range(len(arguments)))


def test_the_launcher_hands_a_servers_share_to_its_node_alone(tmp_path: Path) -> None:
    settings = Settings(inference=InferenceSettings(colocate="split"))

    trainer, node, controller = plan_groups(settings, RunDirectory(tmp_path), gpus=("0",), share=SHARE)

    handed = [group.make_specs()[0].environment.get(VARIABLE) for group in (trainer, node, controller)]
    assert [handed[0], handed[2]] == [None, None]
    assert CardShare.handed_over({VARIABLE: str(handed[1])}) == SHARE
    assert CardShare.handed_over({}) is None


def test_a_server_is_told_its_share_of_a_gpu_and_to_be_able_to_give_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv(VARIABLE, SHARE.environment[VARIABLE])

    for colocate in ("split", "release"):
        sglang, embedded = _command("sglang", colocate), _command("embedded", colocate)
        assert _has(sglang, "--max-total-tokens", "123456", "--mem-fraction-static", "0.9")
        assert _has(sglang, "--enable-memory-saver") is (colocate == "release")
        assert _has(embedded, "--max-total-tokens", "123456")
    apart = _command("sglang", None)
    assert "--mem-fraction-static" not in apart, "as on a node that has joined from another host"


def test_a_server_over_several_shared_gpus_does_not_mind_that_one_is_fuller(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks load at their own pace; SGLang would end where one GPU has a tenth less free than another."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")

    shared, apart = (_server("sglang", colocate, tensor_parallel=2) for colocate in ("release", None))

    assert shared.environment["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] == "0"
    assert "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK" not in apart.environment


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_server_that_gives_memory_back_has_no_segments_that_grow(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A user sets them for the trainer; the library that gives memory back refuses to load under them."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv(name, "expandable_segments:True,max_split_size_mb:128")

    released, split = (_server("sglang", colocate) for colocate in ("release", "split"))

    assert released.environment[name] == "max_split_size_mb:128"
    assert name not in split.environment


def test_on_a_cpu_there_is_no_share_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv(VARIABLE, SHARE.environment[VARIABLE])

    assert not {"--mem-fraction-static", "--enable-memory-saver"} & set(_command("sglang", "release"))
