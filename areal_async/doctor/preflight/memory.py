"""How much memory a model takes where it is trained and where it is served, before anything is loaded.

Estimates: they leave out the caching allocator's waste and what libraries take for themselves, and say so by a
margin. B: bytes of one number in the forward pass.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import msgspec
from safetensors import SafetensorError, safe_open

from areal_async.config.lora import LoraSettings
from areal_async.config.settings import Settings, TrainerSettings
from areal_async.doctor.preflight.findings import PreflightFinding, error, gigabytes, good, warning
from areal_async.doctor.preflight.machine import Gpu, Machine
from areal_async.errors import UserError

STATE_BYTES = 16
"""Per parameter: itself, its gradient and AdamW's two moments, all float32 and shared by the ranks."""
COPIED_BYTES = 12
"""Per parameter, of what a checkpoint is written from: itself and both moments."""
ACTIVATION_BYTES = 17
"""Per token, hidden unit and byte of a number, kept for a layer's backward pass where attention keeps no scores.

Source: Korthikanti et al. 2022, arXiv 2205.05198, eq. 1: 34 s b h bytes a layer at two bytes a number, without the
term 5 a s / h of attention's scores, which fused kernels do not keep.
"""
HEAD_COPIES = 4
"""Chunks of float32 logits that are there at once in the backward pass of the head."""
HEAD_CHUNK_BYTES = 1 << 30
"""Of a chunk's float32 logits at most (``trainer.engine.model``); a row of fewer tokens has fewer."""
PROCESS_BYTES = 500_000_000
"""Of a process that has loaded torch and transformers, before any model."""
MARGIN = 0.9
"""Share of the memory that an estimate may fill before it is called tight."""
NUM_BYTES = {"float32": 4, "bfloat16": 2}


class ModelSize(msgspec.Struct, frozen=True, kw_only=True):
    """What a model's files say of its size."""

    num_parameters: int
    num_layers: int
    hidden: int
    kv_width: int
    """Numbers of keys, and as many of values, that one token leaves in one layer."""
    vocab: int
    context: int
    """Most tokens that it was made for."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read ``config.json`` and the heads of the weights' files; no weight is loaded.

        Raises:
            UserError: the folder holds no decoder's config, or no safetensors.
        """
        config = _json(folder / "config.json")
        config = config.get("text_config", config)
        try:
            heads = config["num_attention_heads"]
            width = config.get("head_dim") or config["hidden_size"] // heads
            return cls(
                num_parameters=sum(_num_parameters(path) for path in _weight_files(folder)),
                num_layers=config["num_hidden_layers"],
                hidden=config["hidden_size"],
                kv_width=width * (config.get("num_key_value_heads") or heads),
                vocab=config["vocab_size"],
                context=config.get("max_position_embeddings", 0),
            )
        except (KeyError, TypeError) as exc:
            raise UserError(f"model: {folder}/config.json has no {exc}; need a decoder such as Qwen3 or Llama") from exc

    def trainer_bytes(self, trainer: TrainerSettings, *, dtype: str, offloads: bool = False) -> int:
        """Return what one rank of a trainer takes at its peak; where it ``offloads``, of the GPU alone."""
        return int(sum(self.trainer_parts(trainer, dtype=dtype, offloads=offloads).values()))

    def trainer_parts(self, trainer: TrainerSettings, *, dtype: str, offloads: bool = False) -> dict[str, float]:
        """Return what ``trainer_bytes`` is made of: bytes by what they hold."""
        number = NUM_BYTES[dtype]
        model_ranks = trainer.tensor_parallel * trainer.pipeline_parallel
        num_shards = trainer.num_ranks // trainer.replicas
        # Adapters are a small part of what they are trained over, and within the margin.
        state = (number if trainer.lora.is_on else STATE_BYTES) * self.num_parameters / num_shards
        embedding = self.vocab * self.hidden
        layer = max(self.num_parameters - embedding, 0) / max(self.num_layers, 1)
        # Two layers are whole at once, the one that computes and the next, and the embedding all the time.
        gathered = (2 * layer + embedding) * number / model_ranks if num_shards > model_ranks or offloads else 0
        # One row's gradients: those of the embedding and the head from first to last, those of one layer, and the copy
        # of either that is on its way to the ranks.
        flowing = (layer + embedding) * number + max(layer, embedding) * NUM_BYTES[trainer.reduce_dtype]
        flowing = 0 if trainer.lora.is_on else flowing / model_ranks
        per_layer = ACTIVATION_BYTES * number * self.hidden * trainer.token_budget / trainer.tensor_parallel
        num_layers = self.num_layers / trainer.pipeline_parallel
        kept = number * self.hidden * trainer.token_budget
        activations = kept * num_layers + per_layer if trainer.activation_checkpointing else per_layer * num_layers
        logits = 4 * trainer.token_budget * self.vocab / trainer.tensor_parallel
        head = HEAD_COPIES * min(logits, HEAD_CHUNK_BYTES)
        if logits > HEAD_CHUNK_BYTES and number < 4 and not trainer.lora.is_on:
            head += 4 * embedding / trainer.tensor_parallel  # chunks add the head's gradient up in float32
        return {
            "state": 0 if offloads else state,
            "gathered": gathered,
            "gradients of a row": flowing,
            "activations": activations,
            "logits": head,
        }

    def copies_bytes(self, trainer: TrainerSettings) -> int:
        """Return what a rank's copies for checkpoints take of the host's memory, beside what is trained."""
        if not trainer.async_checkpoints or trainer.lora.is_on:  # adapters are within the margin
            return 0
        return int(COPIED_BYTES * self.num_parameters * trainer.replicas / trainer.num_ranks)

    def frozen_bytes(self, trainer: TrainerSettings, *, dtype: str) -> int:
        """Return what a rank of a reference takes, which is never trained."""
        return int(NUM_BYTES[dtype] * self.num_parameters * trainer.replicas / trainer.num_ranks)

    def weights_bytes(self, *, dtype: str) -> int:
        """Return the size of the served weights."""
        return NUM_BYTES[dtype] * self.num_parameters

    def cache_bytes_per_token(self, *, dtype: str) -> int:
        """Return what a token takes in a server's cache of keys and values."""
        return 2 * self.num_layers * self.kv_width * NUM_BYTES[dtype]


def check_memory(settings: Settings, machine: Machine, sizes: dict[str, ModelSize]) -> Iterator[PreflightFinding]:
    """Hold the estimates against what the host has.

    Args:
        sizes: by role: ``actor``, and ``critic`` and ``reference`` where the algorithm wants them.
    """
    rank_bytes = bytes_of_rank(settings, sizes, offloads=bool(machine.gpus) and settings.trainer.cpu_offload)
    if machine.gpus:
        yield from _on_gpus(settings, machine.gpus, sizes["actor"], rank_bytes)
    elif machine.memory_bytes is not None:
        copies = sizes["actor"].copies_bytes(settings.trainer)
        if "critic" in sizes:
            copies += sizes["critic"].copies_bytes(_of_critic(settings.trainer))
        yield _on_host(settings, machine.memory_bytes, sizes["actor"], rank_bytes + copies)


def bytes_of_rank(settings: Settings, sizes: dict[str, ModelSize], *, offloads: bool) -> int:
    """Return what all models of one rank take at their peak; where it ``offloads``, of the GPU alone."""
    dtype, trainer = settings.model.dtype, settings.trainer
    total = sizes["actor"].trainer_bytes(trainer, dtype=dtype, offloads=offloads)
    if "critic" in sizes:
        total += sizes["critic"].trainer_bytes(_of_critic(trainer), dtype=dtype, offloads=offloads)
    is_base = trainer.lora.is_on and settings.model.reference.path in (None, settings.model.path)
    if "reference" in sizes and not is_base:  # what adapters are trained over is there already
        total += sizes["reference"].frozen_bytes(trainer.for_role("reference"), dtype=dtype)
    return total


def _of_critic(trainer: TrainerSettings) -> TrainerSettings:
    """Return how the critic is trained, which never has adapters."""
    return trainer.for_role("critic").model_copy(update={"lora": LoraSettings()})


def _on_gpus(settings: Settings, gpus: tuple[Gpu, ...], size: ModelSize, rank_bytes: int) -> Iterator[PreflightFinding]:
    smallest = min(gpu.memory_bytes for gpu in gpus)
    where = f"the smallest GPU ({gpus[0].name})"
    cure = "raise trainer.num_ranks, lower trainer.token_budget, or set trainer.activation_checkpointing=true"
    yield _judge("memory of a trainer rank", rank_bytes, smallest, where=where, cure=cure)
    if settings.inference.colocate is None:  # else both sides are judged together
        yield _server_on_gpus(settings, smallest, size)
    busy = [gpu for gpu in gpus if gpu.free_bytes < gpu.memory_bytes * MARGIN]
    if busy:
        least = min(gpu.free_bytes for gpu in busy)
        saw = f"{len(busy)} of {len(gpus)} have memory taken already, {gigabytes(least)} free on the fullest"
        yield warning("GPUs in use", saw, "end what uses them, or leave them out with CUDA_VISIBLE_DEVICES")


def _server_on_gpus(settings: Settings, smallest: int, size: ModelSize) -> PreflightFinding:
    served, dtype = settings.inference, settings.model.dtype
    weights = size.weights_bytes(dtype=dtype) // served.tensor_parallel
    room = int(smallest * MARGIN) - weights
    per_token = size.cache_bytes_per_token(dtype=dtype) // served.tensor_parallel or 1
    num_tokens = max(room, 0) // per_token
    longest = served.context_length or size.context or settings.rollout.sampling.max_new_tokens
    saw = f"weights {gigabytes(weights)} of {gigabytes(smallest)}, room for {num_tokens:,} cached tokens"
    check = "memory of a server"
    if num_tokens < longest:
        return error(check, f"{saw}, fewer than one request of {longest:,}", "raise inference.tensor_parallel")
    return good(check, f"{saw}: {num_tokens // longest:,} requests of {longest:,} at once")


def _on_host(settings: Settings, memory_bytes: int, size: ModelSize, rank_bytes: int) -> PreflightFinding:
    served, dtype = settings.inference, settings.model.dtype
    num_tokens = settings.rollout.sampling.max_new_tokens * served.max_running_requests
    num_tokens = min(num_tokens, served.max_running_requests * (served.context_length or size.context or num_tokens))
    # A swap stages the new weights beside the old ones.
    server = 2 * size.weights_bytes(dtype=dtype) + num_tokens * size.cache_bytes_per_token(dtype=dtype)
    num_ranks, num_servers = settings.trainer.num_ranks, served.num_servers
    total = num_ranks * (rank_bytes + PROCESS_BYTES) + num_servers * (server + PROCESS_BYTES) + 2 * PROCESS_BYTES
    check = f"memory of {num_ranks} ranks and {num_servers} servers"
    cure = "lower trainer.token_budget, inference.max_running_requests or inference.num_servers"
    return _judge(check, total, memory_bytes, where="this host", cure=cure)


def _judge(check: str, need: int, there: int, *, where: str, cure: str) -> PreflightFinding:
    saw = f"about {gigabytes(need)} of {gigabytes(there)} on {where}"
    if need > there:
        return error(check, saw, cure)
    return warning(check, f"{saw}: tight", cure) if need > there * MARGIN else good(check, saw)


def _weight_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"model: no *.safetensors in {folder}; convert its weights, or take a folder that has them")
    return files


def _num_parameters(path: Path) -> int:
    """Add up the shapes in the head of a safetensors file."""
    try:
        with safe_open(path, framework="numpy") as file:
            return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())
    except (OSError, SafetensorError) as exc:
        raise UserError(f"model: {path} is no whole safetensors file; fetch it again") from exc


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise UserError(f"model: {path} cannot be read: {exc}; give a model's folder") from exc
    if not isinstance(content, dict):
        raise UserError(f"model: {path} is no JSON object; give a model's folder")
    return content
