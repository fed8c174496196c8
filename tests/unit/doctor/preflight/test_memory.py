"""What a model takes before anything is loaded, against figures counted by hand."""

import json
from pathlib import Path

import msgspec
import pytest

from areal_async.config.lora import LoraSettings
from areal_async.config.settings import InferenceSettings, ModelSettings, Settings, TrainerSettings
from areal_async.doctor.preflight.findings import Level
from areal_async.doctor.preflight.machine import Gpu, Machine
from areal_async.doctor.preflight.memory import ModelSize, check_memory
from areal_async.doctor.preflight.sharing import check_sharing, share_of
from areal_async.errors import UserError
from areal_async.inference.card_share import MARGIN, SPARE_BYTES
from tests.unit.trainer.models import save_model
from tests.unit.trainer.seeing import save_seeing_model

ROOT = Path(__file__).parents[4]
QWEN_1B5 = ModelSize(
    num_parameters=1_543_714_304,
    num_layers=28,
    hidden=1536,
    kv_width=256,
    intermediate=8960,
    vocab=151_936,
    is_tied=True,
    context=32_768,
)
"""Qwen2.5-1.5B-Instruct, from its config and the shapes of its weights."""


def _machine(*gpus: Gpu, memory_bytes: int | None = None) -> Machine:
    return Machine(
        num_cores=2, memory_bytes=memory_bytes, gpus=gpus, open_files=4096, shared_memory_bytes=None, is_clock_kept=None
    )


def _settings(**trainer: object) -> Settings:
    return Settings(
        model=ModelSettings(path=str(ROOT / "configs" / "models" / "tiny"), dtype="bfloat16"),
        trainer=TrainerSettings.model_validate(trainer),
        inference=InferenceSettings(backend="embedded"),
    )


def _levels(settings: Settings, machine: Machine) -> dict[str, Level]:
    return {one.check: one.level for one in check_memory(settings, machine, {"actor": QWEN_1B5})}


def test_parameters_are_counted_from_the_heads_of_the_files(tmp_path: Path) -> None:
    """As the loaded model counts them; tied embeddings are stored once."""
    from transformers import AutoModelForCausalLM

    folder = save_model(tmp_path / "model")
    size = ModelSize.read(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert size.num_parameters == sum(one.numel() for one in model.parameters())
    assert (size.num_layers, size.hidden, size.kv_width, size.vocab) == (2, 32, 16, 61)
    assert (size.intermediate, size.is_tied) == (48, True)


def test_a_trainers_state_is_sixteen_bytes_a_parameter_shared_by_its_ranks() -> None:
    """Parameter, gradient and two moments in float32: 24.7 GB on one rank, and what four ranks save of it.

    One row's last gradient is whole, the embedding's, three times in bfloat16, beside a layer's on its way in float32.
    """
    one = QWEN_1B5.trainer_bytes(TrainerSettings(num_ranks=1, token_budget=8), dtype="bfloat16")
    assert one == pytest.approx(16 * 1.5437e9 + 6 * 0.2334e9 + 4 * 1.31e9 / 28, rel=1e-3)
    four = QWEN_1B5.trainer_bytes(TrainerSettings(num_ranks=4, token_budget=8), dtype="bfloat16")
    assert one - four == pytest.approx(0.75 * 16 * 1.5437e9 - (2 * 1.31e9 / 28 + 0.2334e9) * 2, rel=1e-2)


def test_a_frozen_tower_takes_what_it_is_computed_in_and_keeps_nothing(tmp_path: Path) -> None:
    """A trained one has gradient and moments beside, and copies of these; ranks of tensor parallel share none of it."""
    from transformers import AutoModelForImageTextToText

    folder = save_seeing_model(tmp_path, "qwen3_vl")
    size, tower = ModelSize.read(folder), AutoModelForImageTextToText.from_pretrained(folder).model.visual
    num_tower = sum(one.numel() for one in tower.parameters())
    trained, frozen = TrainerSettings(token_budget=64), TrainerSettings(token_budget=64, vision="freeze")
    adapters, beside = (
        frozen.model_copy(update={"lora": LoraSettings(rank=4), "vision": one}) for one in ("lora", "freeze")
    )

    parts, left = (size.trainer_parts(one, dtype="bfloat16") for one in (trained, frozen))
    divided = TrainerSettings(num_ranks=2, token_budget=64, tensor_parallel=2)

    assert parts["state"] - left["state"] == (16 - 2) * num_tower
    assert size.trainer_parts(divided, dtype="bfloat16")["state"] == parts["state"] / 2 + 8 * num_tower
    # Two blocks of 10 x 16 + 2 x 24 numbers, the pixels, two mergers and the last state, of 4 patches for each token.
    seen = 2 * 64 * 4 * (2 * 208 + 96 + 7 * 16)
    assert parts["activations"] - left["activations"] == seen
    adapting, alone = (size.trainer_parts(one, dtype="bfloat16") for one in (adapters, beside))
    assert adapting == {**alone, "activations": alone["activations"] + seen}
    critic, whole = (one.for_role("critic") for one in (adapters, trained))
    assert size.trainer_parts(critic, dtype="bfloat16") == size.trainer_parts(whole, dtype="bfloat16")
    copies = [size.copies_bytes(one, dtype="bfloat16") for one in (trained, frozen)]
    assert copies[0] - copies[1] == (12 - 2) * num_tower


def test_adapters_and_offloading_leave_less_on_a_gpu() -> None:
    """What is trained over is stored in ``model.dtype`` without gradient or moments; offloaded state is the host's."""
    whole = TrainerSettings(num_ranks=1, token_budget=8)
    adapted = TrainerSettings.model_validate({"num_ranks": 1, "token_budget": 8, "lora": {"rank": 16}})
    saved = QWEN_1B5.trainer_bytes(whole, dtype="bfloat16") - QWEN_1B5.trainer_bytes(adapted, dtype="bfloat16")
    assert saved == pytest.approx((16 - 2) * 1.5437e9 + 6 * 0.2334e9 + 4 * 1.31e9 / 28, rel=1e-2)
    small = Gpu("small", 16 * 10**9, 16 * 10**9)
    wanted = {None: Level.ERROR, "lora": Level.GOOD, "cpu_offload": Level.GOOD}
    for name, level in wanted.items():
        given: dict[str, object] = {"lora": {"rank": 16}} if name == "lora" else {"cpu_offload": True} if name else {}
        levels = _levels(_settings(num_ranks=1, token_budget=64, **given), _machine(small))
        assert levels["memory of a trainer rank"] is level, name


def test_activations_grow_with_the_budget_and_shrink_with_checkpointing() -> None:
    """Two bytes a number of what a layer keeps; with checkpointing a layer's input each, and one layer whole.

    The head has a chunk of logits five times, and its gradient, in float32 over the chunks too.
    """
    budget = 10_240
    kept = TrainerSettings(num_ranks=1, token_budget=budget)
    checkpointed = TrainerSettings(num_ranks=1, token_budget=budget, activation_checkpointing=True)
    base = 16 * 1.5437e9 + 5 * (1 << 30) + (4 + 2) * 151_936 * 1536
    layer = 2 * budget * (11 * 1536 + 2 * 256 + 4 * 8960)
    assert QWEN_1B5.trainer_bytes(kept, dtype="bfloat16") - base == pytest.approx(28 * layer, rel=1e-2)
    with_it = QWEN_1B5.trainer_bytes(checkpointed, dtype="bfloat16") - base
    assert with_it == pytest.approx(layer + 28 * 2 * budget * 1536, rel=1e-2)


def test_a_gpu_that_is_too_small_is_an_error_and_a_large_one_is_not() -> None:
    """24 GB do not hold 1.5 B parameters with their optimizer on one rank; four ranks of 80 GB do."""
    small = Gpu("small", 24 * 10**9, 24 * 10**9)
    large = Gpu("large", 80 * 10**9, 80 * 10**9)
    assert _levels(_settings(num_ranks=1), _machine(small))["memory of a trainer rank"] is Level.ERROR
    assert _levels(_settings(num_ranks=4), _machine(large)) == {
        "memory of a trainer rank": Level.GOOD,
        "memory of a server": Level.GOOD,
    }


def test_a_gpu_that_somebody_else_uses_is_told() -> None:
    """The estimate is of the whole memory."""
    busy = Gpu("busy", 80 * 10**9, 20 * 10**9)
    assert _levels(_settings(num_ranks=4), _machine(busy))["GPUs in use"] is Level.WARNING


def _shared(colocate: str, **trainer: object) -> Settings:
    inference = InferenceSettings.model_validate({"backend": "embedded", "colocate": colocate, "context_length": 2048})
    return _settings(**trainer).model_copy(update={"inference": inference})


def _peak(token_budget: int) -> int:
    trainer = TrainerSettings(num_ranks=1, token_budget=8).model_copy(update={"token_budget": token_budget})
    return QWEN_1B5.trainer_bytes(trainer, dtype="bfloat16")


BESIDE = 2 * QWEN_1B5.num_parameters + SPARE_BYTES
"""What a server takes beside its cache."""


def test_a_server_that_shares_a_gpu_has_what_the_trainer_leaves() -> None:
    """Beside its peak (``split``), or beside what it keeps between two steps (``release``)."""
    gpu = Gpu("large", 80 * 10**9, 80 * 10**9)
    budget = {"num_ranks": 1, "token_budget": 10_240}

    split, both = share_of(_shared("split", **budget), (gpu,), {"actor": QWEN_1B5})
    release, _ = share_of(_shared("release", **budget), (gpu,), {"actor": QWEN_1B5})

    assert split.fraction * 80e9 == pytest.approx(MARGIN * 80e9 - _peak(10_240) - SPARE_BYTES, rel=1e-6)
    assert release.fraction * 80e9 == pytest.approx(MARGIN * 80e9 - _peak(0) - SPARE_BYTES, rel=1e-6)
    assert split.cache_tokens == pytest.approx((split.fraction * 80e9 - 2 * 1.5437e9) / (2 * 28 * 256 * 2), rel=1e-3)
    assert both.startswith(f"{_peak(10_240) / 1e9:.1f} GB for a rank and 8.1 GB for a server without its cache, of 80")


@pytest.mark.parametrize(("before", "after"), [(0.0, 0.0), (1.0, 1.0), (0.0, 1.0)])
@pytest.mark.parametrize("num_bytes", [24 * 10**9, 80 * 10**9])
def test_a_server_has_its_share_however_soon_the_trainer_takes_its_own(
    before: float, after: float, num_bytes: int
) -> None:
    """By SGLang 0.5.23's own arithmetic: it looks what is free before it loads its weights, and after that.

    Args:
        before: share of what the trainer keeps that it has taken when the server looks first.
        after: and when it looks again.
    """
    size = msgspec.structs.replace(QWEN_1B5, num_parameters=QWEN_1B5.num_parameters // 3)
    settings = _shared("release", num_ranks=1, token_budget=8)
    share, _ = share_of(settings, (Gpu("any", num_bytes, num_bytes),), {"actor": size})
    flags = share.flags(is_sglang=True)
    told = dict(zip(flags[::2], flags[1::2], strict=True))
    trainer = TrainerSettings(num_ranks=1, token_budget=8).model_copy(update={"token_budget": 0})
    kept = size.trainer_bytes(trainer, dtype="bfloat16")

    free_at_first = num_bytes - before * kept
    slack = free_at_first * (1 - float(told["--mem-fraction-static"]))
    rest = num_bytes - after * kept - size.weights_bytes(dtype="bfloat16") - slack
    num_tokens = min(rest // size.cache_bytes_per_token(dtype="bfloat16"), int(told["--max-total-tokens"]))

    assert num_tokens == share.cache_tokens


@pytest.mark.parametrize(
    ("colocate", "left_bytes", "sentence"),
    [
        ("split", -(10**9), r"got about \d+.\d GB for a rank and 8.1 GB for a server .* need 90% of it at most"),
        ("release", -(10**9), "need 90% of it at most; lower trainer.token_budget"),
        ("split", 40 * 10**6, r"leaves 40.0 MB, need 58.7 MB for the cache of one .* 2,048 tokens; .*colocate=release"),
    ],
)
def test_both_sides_that_do_not_fit_one_gpu_are_refused_with_both_figures(
    colocate: str, left_bytes: int, sentence: str
) -> None:
    num_bytes = round((_peak(20_480) + BESIDE + left_bytes) / MARGIN)
    gpu = Gpu("small", num_bytes, num_bytes)
    settings = _shared(colocate, num_ranks=1, token_budget=20_480)

    with pytest.raises(UserError, match=sentence):
        list(check_sharing(settings, (gpu,), {"actor": QWEN_1B5}))
    assert "memory of a server" not in _levels(settings, _machine(gpu)), "the sum is what counts"


def test_a_host_without_gpus_holds_ranks_and_servers_together() -> None:
    """A laptop of 16 GB cannot train 1.5 B parameters; one of 256 GB can."""
    for num_bytes, level in ((16 * 10**9, Level.ERROR), (256 * 10**9, Level.GOOD)):
        assert list(_levels(_settings(), _machine(memory_bytes=num_bytes)).values()) == [level]


def test_a_host_beside_gpus_holds_what_ranks_are_to_write() -> None:
    """Four ranks with the copies for a checkpoint each, two of a version's six files, and a process: 24.6 GB."""
    gpus = (Gpu("large", 80 * 10**9, 80 * 10**9),) * 4
    check = "host memory of 4 ranks with GPUs"
    for num_bytes, level in ((24 * 10**9, Level.ERROR), (28 * 10**9, Level.GOOD)):
        assert _levels(_settings(num_ranks=4), _machine(*gpus, memory_bytes=num_bytes))[check] is level
    trainer = TrainerSettings(num_ranks=4)
    assert QWEN_1B5.version_bytes(trainer, dtype="bfloat16") == pytest.approx(2 * 1.5437e9 / 3, rel=1e-3)


@pytest.mark.parametrize(("bucket_bytes", "largest"), [(1 << 29, 1 << 29), (1 << 20, 2 * 151_936 * 1536)])
def test_a_broadcast_beside_a_step_has_a_bucket_on_the_gpu_and_two_on_the_host(bucket_bytes: int, largest: int) -> None:
    """Of rank 0 alone on the host, and at least the embedding, which is larger than small buckets."""
    gpus, there = (Gpu("large", 80 * 10**9, 80 * 10**9),) * 4, 10**12
    for machine, on_gpu in ((_machine(*gpus, memory_bytes=there), True), (_machine(memory_bytes=there), False)):
        sent, written = (
            [
                float(one.saw.split()[1])
                for one in check_memory(_served(transfer, bucket_bytes), machine, {"actor": QWEN_1B5})
                if "rank" in one.check
            ]
            for transfer in ("distributed", "disk")
        )
        second_version = 4 * QWEN_1B5.version_bytes(TrainerSettings(num_ranks=4), dtype="bfloat16")
        more = [largest] * on_gpu + [2 * largest + second_version]
        assert [a - b for a, b in zip(sent, written, strict=True)] == pytest.approx(
            [one / 1e9 for one in more], abs=0.11
        )


def _served(transfer: str, bucket_bytes: int) -> Settings:
    given = {"backend": "embedded", "weight_transfer": transfer, "bucket_bytes": bucket_bytes}
    return _settings(num_ranks=4).model_copy(update={"inference": InferenceSettings.model_validate(given)})


def test_copies_for_checkpoints_are_counted_where_ranks_share_the_hosts_memory() -> None:
    """Twelve bytes a parameter: 18.5 GB of 1.5 B; with replicas as often as there are these."""
    assert QWEN_1B5.copies_bytes(TrainerSettings(num_ranks=4), dtype="bfloat16") == pytest.approx(
        12 * 1.5437e9 / 4, rel=1e-3
    )
    assert QWEN_1B5.copies_bytes(TrainerSettings(num_ranks=4, replicas=2), dtype="bfloat16") == pytest.approx(
        6 * 1.5437e9, rel=1e-3
    )
    saw = [
        next(
            iter(check_memory(_settings(async_checkpoints=on), _machine(memory_bytes=10**12), {"actor": QWEN_1B5}))
        ).saw
        for on in (True, False)
    ]
    with_copies, without = (float(one.split()[1]) for one in saw)
    assert with_copies - without == pytest.approx(12 * 1.5437, abs=1)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "no *.safetensors in"),
        (b"\xff" * 16, "is no whole safetensors file"),
        (b"\x10", "is no whole safetensors file"),
    ],
)
def test_a_folder_without_whole_weights_is_said_in_one_sentence(
    tmp_path: Path, content: bytes | None, sentence: str
) -> None:
    """Not a traceback of whoever reads it."""
    config = {"num_attention_heads": 4, "hidden_size": 8, "num_hidden_layers": 1, "vocab_size": 5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    if content is not None:
        (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=sentence.replace("*", r"\*")):
        ModelSize.read(tmp_path)
