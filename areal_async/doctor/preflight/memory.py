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

from areal_async.config.settings import Settings, TrainerSettings
from areal_async.doctor.preflight.findings import PreflightFinding, error, gigabytes, good, warning
from areal_async.doctor.preflight.machine import Gpu, Machine
from areal_async.errors import UserError
from areal_async.inference.card_share import MARGIN
from areal_async.vision.spec import FAMILIES

STATE_BYTES = 16
"""Per parameter: itself, its gradient and AdamW's two moments, all float32 and shared by the ranks."""
COPIED_BYTES = 12
"""Per parameter, of what a checkpoint is written from: itself and both moments."""
NORM_NUMBERS = {"float32": 6, "bfloat16": 8}
"""Per token and hidden unit, what a layer's two norms keep for the backward pass: input, normed and scaled; the input
in float32, which is a copy in bfloat16."""
MIXED_NUMBERS = 3
"""The same of a layer's attention: queries and what was attended, before and after its places are put in order. Keys
and values are kept too, and no scores."""
GATED_NUMBERS = 4
"""Per token and unit of the gated layer after attention."""
TOWER_NUMBERS = 10
"""Per patch and hidden unit, what a block of a vision tower keeps: the inputs of its two halves, both normed, queries
and keys turned to their places beside what they were made from, values, and what was attended, twice."""
GATED_TOWER_NUMBERS = {"float32": 12, "bfloat16": 14}
"""The same of blocks with a gated layer, whose norms keep more (``NORM_NUMBERS``)."""
MERGER_NUMBERS = 3
"""Per patch and hidden unit, what each merger keeps: normed, and its hidden layer before and after it is activated."""
FILE_BYTES = 512 << 20
"""Of a file of weights at most (``trainer.engine.model_folder``); a rank holds whole ones."""
HEAD_COPIES = 5
"""Chunks of float32 logits that are there at once in the backward pass of the head."""
HEAD_CHUNK_BYTES = 1 << 30
"""Of a chunk's float32 logits at most (``trainer.engine.model``); a row of fewer tokens has fewer."""
PROCESS_BYTES = 500_000_000
"""Of a process that has loaded torch and transformers, before any model."""
NUM_BYTES = {"float32": 4, "bfloat16": 2}


class TowerSize(msgspec.Struct, frozen=True, kw_only=True):
    """What a model's files say of its vision tower."""

    num_parameters: int
    num_block_parameters: int
    """Of all blocks; the others are gathered as long as the model computes."""
    num_layers: int
    hidden: int
    intermediate: int
    """Width of a block's layer after attention."""
    is_gated: bool
    """Whether that layer is gated."""
    num_mergers: int
    """What makes tokens of patches, DeepStack's among it."""
    merge_size: int
    """Patches along the side of a token."""
    patch: int
    """Numbers of a patch's pixels."""

    @classmethod
    def of(cls, config: dict[str, Any], folder: Path) -> Self:
        """Read it from ``vision_config`` and the heads of the weights' files."""
        return cls(
            num_parameters=sum(_num_parameters(path, of="visual.") for path in _weight_files(folder)),
            num_block_parameters=sum(_num_parameters(path, of="visual.blocks.") for path in _weight_files(folder)),
            num_layers=config["depth"],
            hidden=config["hidden_size"],
            intermediate=config["intermediate_size"],
            is_gated="fullatt_block_indexes" in config,
            num_mergers=1 + len(config.get("deepstack_visual_indexes", ())),
            merge_size=config["spatial_merge_size"],
            patch=3 * config["temporal_patch_size"] * config["patch_size"] ** 2,
        )

    def activation_bytes(self, trainer: TrainerSettings, dtype: str) -> int:
        """Return what the backward pass needs of a row all of whose tokens show, each something else.

        Scores are not kept, however large an image is. A frozen tower has no backward pass.
        """
        if trainer.vision == "freeze":
            return 0
        if self.is_gated:
            layer = GATED_TOWER_NUMBERS[dtype] * self.hidden + GATED_NUMBERS * self.intermediate
        else:
            layer = TOWER_NUMBERS * self.hidden + 2 * self.intermediate
        blocks = self.num_layers * self.hidden + layer if trainer.activation_checkpointing else self.num_layers * layer
        ends = self.patch + (MERGER_NUMBERS * self.num_mergers + 1) * self.hidden
        return NUM_BYTES[dtype] * trainer.token_budget * self.merge_size**2 * (blocks + ends)

    def state_bytes(self, trainer: TrainerSettings, dtype: str, *, of_each: int) -> int:
        """Return what a rank of ``trainer`` has of something that takes ``of_each`` bytes of what is trained.

        No ranks share the tower's parameters that share the arithmetic of layers.
        """
        each = of_each if trainer.vision == "train" else NUM_BYTES[dtype]
        return each * self.num_parameters * trainer.tensor_parallel * trainer.replicas // trainer.num_ranks


class ModelSize(msgspec.Struct, frozen=True, kw_only=True):
    """What a model's files say of its size."""

    num_parameters: int
    num_layers: int
    hidden: int
    kv_width: int
    """Numbers of keys, and as many of values, that one token leaves in one layer."""
    intermediate: int
    """Width of the layer after attention."""
    vocab: int
    is_tied: bool
    """Whether the head is the embedding."""
    context: int
    """Most tokens that it was made for."""
    tower: TowerSize | None = None
    """Of a model that sees."""

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read ``config.json`` and the heads of the weights' files; no weight is loaded.

        Raises:
            UserError: the folder holds no decoder's config, or no safetensors.
        """
        whole = _json(folder / "config.json")
        config = whole.get("text_config", whole)
        try:
            heads = config["num_attention_heads"]
            width = config.get("head_dim") or config["hidden_size"] // heads
            return cls(
                num_parameters=sum(_num_parameters(path) for path in _weight_files(folder)),
                num_layers=config["num_hidden_layers"],
                hidden=config["hidden_size"],
                kv_width=width * (config.get("num_key_value_heads") or heads),
                intermediate=config.get("intermediate_size") or 4 * config["hidden_size"],
                vocab=config["vocab_size"],
                is_tied=config.get("tie_word_embeddings", True),
                context=config.get("max_position_embeddings", 0),
                tower=TowerSize.of(whole["vision_config"], folder) if whole.get("model_type") in FAMILIES else None,
            )
        except (KeyError, TypeError) as exc:
            raise UserError(f"model: {folder}/config.json has no {exc}; need a decoder such as Qwen3 or Llama") from exc

    def trainer_bytes(self, trainer: TrainerSettings, *, dtype: str, offloads: bool = False) -> int:
        """Return what one rank of a trainer takes at its peak; where it ``offloads``, of the GPU alone."""
        return int(sum(self.trainer_parts(trainer, dtype=dtype, offloads=offloads).values()))

    def trainer_parts(self, trainer: TrainerSettings, *, dtype: str, offloads: bool = False) -> dict[str, float]:
        """Return what ``trainer_bytes`` is made of: bytes by what they hold."""
        number, reduced = NUM_BYTES[dtype], NUM_BYTES[trainer.reduce_dtype]
        model_ranks = trainer.tensor_parallel * trainer.pipeline_parallel
        num_shards = trainer.num_ranks // trainer.replicas
        # Adapters are a small part of what they are trained over, and within the margin.
        state = (number if trainer.lora.is_on else STATE_BYTES) * self._num_decoder_parameters / num_shards
        embedding = self.vocab * self.hidden
        words = embedding if self.is_tied else 2 * embedding
        layer = max(self._num_decoder_parameters - words, 0) / max(self.num_layers, 1)
        # Two layers are whole at once, the one that computes and the next, and the words all the time.
        gathered = (2 * layer + words) * number / model_ranks if num_shards > model_ranks or offloads else 0
        tower, kept = self.tower, 0
        if tower is not None:
            state += tower.state_bytes(trainer, dtype, of_each=STATE_BYTES)
            ends = tower.num_parameters - tower.num_block_parameters
            gathered += ends * number if num_shards > model_ranks or offloads else 0
            kept = tower.activation_bytes(trainer, dtype)
        parts = {"state": 0 if offloads else state, "gathered": gathered}
        head, last = self._gradient_bytes(number, reduced, layer=layer)
        if trainer.lora.is_on:
            head = last = 0
        at_head = {
            "gradients of a row": head / model_ranks,
            "activations": self._activation_bytes(trainer, dtype) + kept,
            "logits": self._logits_bytes(trainer, number),
        }
        at_end = {"gradients of a row": last / model_ranks, "activations": 0, "logits": 0}
        # A row's backward pass begins with all its activations, and ends with the gradient of the embedding.
        return parts | max(at_head, at_end, key=lambda moment: sum(moment.values()))

    @property
    def _num_decoder_parameters(self) -> int:
        return self.num_parameters - (0 if self.tower is None else self.tower.num_parameters)

    def _gradient_bytes(self, number: int, reduced: int, *, layer: float) -> tuple[float, float]:
        """Return what one row's gradients take, beside shards, when the head's is made, and when the last one is."""
        embedding = self.vocab * self.hidden
        if self.is_tied:  # the head's, the embedding's and their sum; or that and the copy that goes to the ranks
            words = max(3 * number, number + reduced) * embedding
        else:
            words = 2 * (number + reduced) * embedding
        return embedding * number, words + layer * reduced

    def _activation_bytes(self, trainer: TrainerSettings, dtype: str) -> float:
        number, tokens = NUM_BYTES[dtype], trainer.token_budget
        divided = MIXED_NUMBERS * self.hidden + 2 * self.kv_width + GATED_NUMBERS * self.intermediate
        per_layer = number * tokens * (NORM_NUMBERS[dtype] * self.hidden + divided / trainer.tensor_parallel)
        num_layers = self.num_layers / trainer.pipeline_parallel
        if trainer.activation_checkpointing:
            return number * tokens * self.hidden * num_layers + per_layer
        return per_layer * num_layers

    def _logits_bytes(self, trainer: TrainerSettings, number: int) -> float:
        logits = 4 * trainer.token_budget * self.vocab / trainer.tensor_parallel
        head = HEAD_COPIES * min(logits, HEAD_CHUNK_BYTES)
        if logits > HEAD_CHUNK_BYTES and number < 4 and not trainer.lora.is_on:
            # Chunks add the head's gradient up in float32.
            head += 4 * self.vocab * self.hidden / trainer.tensor_parallel
        return head

    def copies_bytes(self, trainer: TrainerSettings, *, dtype: str) -> int:
        """Return what a rank's copies for checkpoints take of the host's memory, beside what is trained."""
        if not trainer.async_checkpoints or trainer.lora.is_on:  # adapters are within the margin
            return 0
        copied = int(COPIED_BYTES * self._num_decoder_parameters * trainer.replicas / trainer.num_ranks)
        return copied + (0 if self.tower is None else self.tower.state_bytes(trainer, dtype, of_each=COPIED_BYTES))

    def version_bytes(self, trainer: TrainerSettings, *, dtype: str) -> int:
        """Return what the rank with most of it holds of a version, beside what is trained: whole files."""
        if trainer.lora.is_on and trainer.lora.transfer != "merged":  # adapters are within the margin
            return 0
        total = self.weights_bytes(dtype=dtype)
        num_files = -(-total // FILE_BYTES)
        return total * -(-num_files // trainer.num_ranks) // num_files

    def frozen_bytes(self, trainer: TrainerSettings, *, dtype: str) -> int:
        """Return what a rank of a reference takes, which is never trained."""
        return int(NUM_BYTES[dtype] * self.num_parameters * trainer.replicas / trainer.num_ranks)

    def weights_bytes(self, *, dtype: str) -> int:
        """Return the size of the served weights."""
        return NUM_BYTES[dtype] * self.num_parameters

    def bucket_bytes(self, settings: Settings) -> int:
        """Return the largest bucket that a broadcast beside a step has; 0 where there is none. On rank 0 alone."""
        if settings.inference.weight_transfer != "distributed":
            return 0
        number = NUM_BYTES[settings.model.dtype]
        largest = number * self.vocab * self.hidden  # goes alone, whatever its size
        return min(max(settings.inference.bucket_bytes, largest), number * self.num_parameters)

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
        # A bucket is put onto rank 0's GPU where it is sent, while the next step runs there.
        rank_bytes += sizes["actor"].bucket_bytes(settings)
        yield from _on_gpus(settings, machine.gpus, sizes["actor"], rank_bytes)
        if machine.memory_bytes is not None:
            yield _beside_gpus(settings, machine.memory_bytes, len(machine.gpus), sizes)
    elif machine.memory_bytes is not None:
        yield _on_host(settings, machine.memory_bytes, sizes["actor"], rank_bytes + _beside_bytes(settings, sizes))


def _sent_bytes(settings: Settings, size: ModelSize) -> int:
    """Return what rank 0 has in the host's memory of a broadcast from files: a bucket's tensors, and these joined."""
    return 2 * size.bucket_bytes(settings)


def _beside_bytes(settings: Settings, sizes: dict[str, ModelSize]) -> int:
    """Return what a rank has in the host's memory of what it trains, to be written."""
    copies = sizes["actor"].copies_bytes(settings.trainer, dtype=settings.model.dtype)
    if "critic" in sizes:
        copies += sizes["critic"].copies_bytes(settings.trainer.for_role("critic"), dtype=settings.model.dtype)
    version = sizes["actor"].version_bytes(settings.trainer, dtype=settings.model.dtype)
    # One is written, the next is there already.
    return copies + version * (2 if settings.inference.weight_transfer == "distributed" else 1)


def _beside_gpus(settings: Settings, memory_bytes: int, num_gpus: int, sizes: dict[str, ModelSize]) -> PreflightFinding:
    rank_bytes = PROCESS_BYTES + _beside_bytes(settings, sizes)
    if settings.trainer.cpu_offload:
        rank_bytes += bytes_of_rank(settings, sizes, offloads=False) - bytes_of_rank(settings, sizes, offloads=True)
    num_ranks = min(settings.trainer.ranks_per_host, num_gpus)
    check = f"host memory of {num_ranks} ranks with GPUs"
    total = num_ranks * rank_bytes + _sent_bytes(settings, sizes["actor"])
    return _judge(check, total, memory_bytes, where="this host", cure="raise trainer.num_ranks")


def bytes_of_rank(settings: Settings, sizes: dict[str, ModelSize], *, offloads: bool) -> int:
    """Return what all models of one rank take at their peak; where it ``offloads``, of the GPU alone."""
    dtype, trainer = settings.model.dtype, settings.trainer
    total = sizes["actor"].trainer_bytes(trainer, dtype=dtype, offloads=offloads)
    if "critic" in sizes:
        total += sizes["critic"].trainer_bytes(trainer.for_role("critic"), dtype=dtype, offloads=offloads)
    is_base = trainer.lora.is_on and settings.model.reference.path in (None, settings.model.path)
    if "reference" in sizes and not is_base:  # what adapters are trained over is there already
        total += sizes["reference"].frozen_bytes(trainer.for_role("reference"), dtype=dtype)
    return total


def _on_gpus(settings: Settings, gpus: tuple[Gpu, ...], size: ModelSize, rank_bytes: int) -> Iterator[PreflightFinding]:
    smallest = min(gpu.memory_bytes for gpu in gpus)
    where = f"the smallest GPU ({gpus[0].name})"
    cure = "raise trainer.num_ranks, lower trainer.token_budget, or set trainer.activation_checkpointing=true"
    yield _judge("memory of a trainer rank", rank_bytes, smallest, where=where, cure=cure)
    if settings.inference.colocate is None:  # else both sides are judged together
        yield _server_on_gpus(settings, smallest, size)
    busy = [gpu for gpu in gpus if is_used(gpu)]
    if busy:
        least = min(gpu.free_bytes for gpu in busy)
        saw = f"{len(busy)} of {len(gpus)} have memory taken already, {gigabytes(least)} free on the fullest"
        yield warning("GPUs in use", saw, "end what uses them, or leave them out with CUDA_VISIBLE_DEVICES")


def is_used(gpu: Gpu) -> bool:
    """Whether something has taken more of a GPU's memory than its driver does."""
    return gpu.free_bytes < gpu.memory_bytes * MARGIN


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
    num_ranks, num_servers = settings.trainer.ranks_per_host, served.num_servers
    total = num_ranks * (rank_bytes + PROCESS_BYTES) + num_servers * (server + PROCESS_BYTES) + 2 * PROCESS_BYTES
    total += _sent_bytes(settings, size)
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


def _num_parameters(path: Path, *, of: str = "") -> int:
    """Add up the shapes in the head of a safetensors file, of parameters with this in their names."""
    try:
        with safe_open(path, framework="numpy") as file:
            return sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys() if of in name)
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
