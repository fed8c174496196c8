"""An adapter is served merged into the weights it was trained over, to every request and under its own version."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anyio
import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from areal_async.config.settings import InferenceSettings
from areal_async.errors import UserError
from areal_async.inference.embedded.engine.errors import WeightsError
from areal_async.inference.embedded.engine.weights import (
    Merged,
    checksum_weights,
    named_weights,
    shown_weights,
    stage_tensors,
    stage_weights,
    swap_weights,
)
from areal_async.inference.http import ServerApi, make_client
from areal_async.inference.pool import ServerPool
from areal_async.inference.supervision.updates import FleetContext, Updater
from areal_async.inference.supervision.verify import Verifier
from areal_async.protocol.types import ADAPTER, DISK, WeightsVersion
from tests.unit.inference.embedded_engine import Server, prompt_of, reference_logprobs

RANK, ALPHA = 4, 8.0
QUERY, DOWN = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj"
SHAPES = {QUERY: (64, 64), DOWN: (64, 128)}

Edit = Callable[[dict[str, torch.Tensor], dict[str, Any]], None]


def write_adapter(folder: Path, *modules: str, seed: int = 0, edit: Edit = lambda tensors, config: None) -> Path:
    """Write a random adapter as PEFT does."""
    folder.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module in modules:
        num_out, num_in = SHAPES[module]
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.randn(RANK, num_in, generator=generator) / 8
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.randn(num_out, RANK, generator=generator) / 8
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", "target_modules": ["q_proj"]}
    edit(tensors, config)
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merged_by_hand(model: Path, adapter: Path) -> dict[str, torch.Tensor]:
    weights, tensors = load_file(model / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name in [name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")]:
        delta = tensors[f"{name}.lora_B.weight"].double() @ tensors[f"{name}.lora_A.weight"].double()
        key = f"{name.removeprefix('base_model.model.')}.weight"
        weights[key] = (weights[key].double() + delta * ALPHA / RANK).float()
    return weights


def save_merged(model: Path, adapter: Path, folder: Path) -> Path:
    causal_lm = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    causal_lm.load_state_dict(merged_by_hand(model, adapter), strict=False)
    causal_lm.save_pretrained(folder)
    return folder


class Served:
    """A model in the state that updates leave it in."""

    def __init__(self, model: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).requires_grad_(False)
        self.merged = Merged()

    def load(self, folder: Path) -> None:
        self.merged = swap_weights(self.model, stage_weights(self.model, str(folder), self.merged), self.merged)

    def gap(self, expected: dict[str, torch.Tensor]) -> float:
        found = named_weights(self.model)
        return max(float((found[name] - tensor).abs().max()) for name, tensor in expected.items())


def test_the_next_adapter_takes_the_place_of_the_last(models: list[Path], tmp_path: Path) -> None:
    served = Served(models[0])
    first = write_adapter(tmp_path / "1", QUERY, DOWN, seed=1)
    second = write_adapter(tmp_path / "2", DOWN, seed=2)

    served.load(first)
    assert served.gap(merged_by_hand(models[0], first)) < 1e-6
    served.load(second)
    assert served.gap(merged_by_hand(models[0], second)) < 1e-6
    served.load(first)

    assert served.gap(merged_by_hand(models[0], first)) < 1e-6
    assert served.gap(load_file(models[0] / "model.safetensors")) > 1e-2


def test_whole_weights_take_the_place_of_an_adapter_and_of_what_it_is_merged_into(
    models: list[Path], tmp_path: Path
) -> None:
    served = Served(models[0])
    adapter = write_adapter(tmp_path / "1", QUERY)
    served.load(adapter)

    served.load(models[1])

    assert served.gap(load_file(models[1] / "model.safetensors")) == 0
    assert served.merged == Merged()
    served.load(adapter)
    assert served.gap(merged_by_hand(models[1], adapter)) < 1e-6


def test_a_broadcast_of_some_tensors_leaves_the_rest_of_the_base(models: list[Path], tmp_path: Path) -> None:
    served = Served(models[0])
    adapter = write_adapter(tmp_path / "1", QUERY, DOWN)
    served.load(adapter)
    name = f"{QUERY}.weight"
    other = load_file(models[1] / "model.safetensors")[name]

    served.merged = swap_weights(served.model, stage_tensors(served.model, [(name, other)]), served.merged)
    served.load(adapter)

    found = named_weights(served.model)
    delta = merged_by_hand(models[0], adapter)[name] - load_file(models[0] / "model.safetensors")[name]
    torch.testing.assert_close(found[name], other + delta, atol=1e-6, rtol=0)
    torch.testing.assert_close(
        found[f"{DOWN}.weight"], merged_by_hand(models[0], adapter)[f"{DOWN}.weight"], atol=1e-6, rtol=0
    )


def test_what_is_shown_of_an_adapter_proves_it_and_its_base(models: list[Path], tmp_path: Path) -> None:
    served = Served(models[0])
    adapter = write_adapter(tmp_path / "1", QUERY)
    before = checksum_weights(shown_weights(served.model, served.merged))

    served.load(adapter)

    after = checksum_weights(shown_weights(served.model, served.merged))
    written = checksum_weights(load_file(adapter / "adapter_model.safetensors"))
    changed = {name for name, value in after.items() if before.get(name) != value}
    assert changed == {f"{QUERY}.weight", f"{QUERY}.base_layer.weight", *written}
    assert after[f"{QUERY}.base_layer.weight"] == before[f"{QUERY}.weight"]
    assert {name: after[name] for name in written} == written


def _drop_half(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    del tensors[f"base_model.model.{QUERY}.lora_B.weight"]


def _unknown_module(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    for half in ("lora_A", "lora_B"):
        tensors[f"base_model.model.model.layers.9.{half}.weight"] = torch.zeros(RANK, RANK)


def _other_shape(tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> None:
    tensors[f"base_model.model.{QUERY}.lora_A.weight"] = torch.zeros(RANK, 63)


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        (_drop_half, "not pairs of .lora_A.weight and .lora_B.weight"),
        (_unknown_module, "adapts model.layers.9, which this model does not have"),
        (_other_shape, r"as \[64, 4\] times \[4, 63\], need \[64, 64\]"),
        (lambda tensors, config: config.update(rank_pattern={"q_proj": 2}), "with rank_pattern="),
        (lambda tensors, config: config.update(use_dora=True), "with use_dora=True; need a plain LORA adapter"),
        (lambda tensors, config: config.update(peft_type="IA3"), "is of type IA3"),
        (lambda tensors, config: config.pop("r"), "missing required field `r`"),
        (lambda tensors, config: tensors.clear(), "not pairs"),
    ],
)
def test_an_adapter_that_would_be_served_wrongly_is_refused_and_changes_nothing(
    edit: Edit, reason: str, models: list[Path], tmp_path: Path
) -> None:
    served = Served(models[0])
    before = named_weights(served.model)

    with pytest.raises(WeightsError, match=reason):
        served.load(write_adapter(tmp_path / "1", QUERY, edit=edit))

    assert all(torch.equal(tensor, before[name]) for name, tensor in named_weights(served.model).items())


def test_a_torn_adapter_is_refused(models: list[Path], tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "1", QUERY) / "adapter_model.safetensors"
    adapter.write_bytes(adapter.read_bytes()[:-5])

    with pytest.raises(WeightsError, match="write the adapter whole, then rename it"):
        Served(models[0]).load(tmp_path / "1")


def test_requests_go_on_under_an_adapter_and_their_tokens_name_both_versions(
    server: Server, models: list[Path], tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "1", QUERY, DOWN)
    prompt = prompt_of(9)
    with server.stream(prompt, max_new_tokens=200) as stream:
        stream.read(2)
        server.post("/pause_generation", mode="retract")
        answer = server.post("/update_weights_from_disk", model_path=str(adapter), weight_version="1-1")
        server.post("/continue_generation")
        stream.read()

    assert answer.json()["success"], answer.text
    spans = stream.meta["weight_versions"]
    assert [span["version"] for span in spans] == ["0-0", "1-1"]
    border = spans[0]["end"]
    old = reference_logprobs(models[0], prompt, stream.output_ids)
    new = reference_logprobs(save_merged(models[0], adapter, tmp_path / "merged"), prompt, stream.output_ids)
    expected = torch.tensor(old[:border] + new[border:])
    torch.testing.assert_close(torch.tensor(stream.logprobs), expected, atol=1e-4, rtol=0)
    assert float((torch.tensor(old) - torch.tensor(new)).abs().max()) > 1e-2


@pytest.mark.anyio
@pytest.mark.parametrize("kind", [ADAPTER, DISK])
async def test_a_node_whose_servers_take_no_adapters_ends_unless_whole_weights_follow(kind: str) -> None:
    """A run of embedded servers goes on with SGLang's: its last adapter is still announced, then taken over."""
    pool = ServerPool(["s0"], deadline_s=60)

    async def publish(server: object) -> None:
        raise AssertionError("nothing changes")

    around = FleetContext(
        settings=InferenceSettings(backend="sglang"),
        pool=pool,
        verifier=Verifier(has_sha256=True),
        publish=publish,
    )
    left = WeightsVersion(version="1-5", path="/w", kind=ADAPTER)
    around.target.announce(left)
    follow = (msgspec.structs.replace(left, taken_by=2), WeightsVersion(version="2-5", path="/w", kind=kind))
    ends: list[str] = []

    async def run(updater: Updater) -> None:
        try:
            ends.append(await updater.run())
        except UserError as exc:
            ends.append(str(exc))

    async with make_client(max_connections=1) as http, anyio.create_task_group() as tasks:
        tasks.start_soon(run, Updater(pool.servers["s0"], ServerApi(http, "http://127.0.0.1:1"), around))
        for next_one in follow:
            await anyio.wait_all_tasks_blocked()
            assert ends == []
            around.target.announce(next_one)

    (end,) = ends
    assert end.startswith("weights 2-5: ")
    assert ("got an adapter" in end and "set trainer.lora.transfer to merged" in end) is (kind == ADAPTER), end
