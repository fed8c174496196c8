"""A decoder cut into stages of a pipeline, and the stages that one rank holds.

A stage is the decoder itself with the layers of the others taken out: what is left runs as the model's own forward
pass runs it (rotary embedding, arguments of attention, order), so any Hugging Face decoder with a list of layers can
be cut. What has weights and stands before the list (the embedding) belongs to the first stage, what stands after it
(the last norm, the head) to the last. Stage ``i`` of a pipeline of R ranks lies on rank ``i mod R``.

Invariant: parameters go by the names of the whole decoder, whichever stage holds them. Tied weights that the first
and the last stage both need are two parameters of one name, and stay equal.

Legend: T tokens of a packed row, W tokens of the widest one in a call, H hidden.
"""

import copy
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from areal_async.errors import UserError
from areal_async.trainer.engine.parallel.dims import PP, ParallelDims, local_shard, whole_of
from areal_async.trainer.packing.flops import DecoderFlops, decoder_flops
from areal_async.trainer.packing.rows import PackedRow


class Readable(Protocol):
    """What a stage is made of: a model of packed rows that can be entered and left between its layers."""

    num_outputs: int
    """Tensors of [S] that it answers a row with; a tuple where there are several."""

    def states(self, row: PackedRow, received: Tensor | None = None) -> Tensor:
        """Return what comes out of the decoder [1, T, H], of the row's tokens or of another stage's states."""
        ...

    def read(self, hidden_TH: Tensor, row: PackedRow) -> Any:
        """Return what the model says of the row's scored tokens."""
        ...


class Skipped(nn.Module):
    """Stands in for a layer of another stage."""

    def __init__(self) -> None:
        super().__init__()
        self.received: Tensor | None = None
        """What the layer gave there, where this stage goes on from it."""

    def forward(self, hidden: Tensor, *_arguments: Any, **_named: Any) -> Tensor:
        """Return the states as they came, or as they were received."""
        return hidden if self.received is None else self.received


class Stage(nn.Module):
    """One stage, called with the states of the stage before it, and once for each row of ``begin``, in order."""

    def __init__(self, model: nn.Module, decoder: nn.Module, *, is_first: bool, is_last: bool) -> None:
        """``model`` is ``Readable`` and its decoder already cut."""
        super().__init__()
        self.model: Any = model
        self.decoder = decoder
        self.is_first = is_first
        self.is_last = is_last
        skipped = [layer for layer in _layers(decoder) if isinstance(layer, Skipped)]
        # The states come in where the layer before this stage's first would have given them: what the model does
        # with an embedding on its way to the layers is done once, by the first stage.
        self._entry = skipped[0] if skipped and not is_first else None
        self._rows: deque[PackedRow] = deque()
        self._width = 0
        self.answers: list[Any] = []
        """What the model said of each row so far, detached; empty but on the last stage."""

    def begin(self, rows: Sequence[PackedRow], *, width: int) -> None:
        """Say which rows the next calls are of. ``width``: W, of the states between stages."""
        self._rows = deque(rows)
        self._width = width
        self.answers = []

    def forward(self, received: Tensor) -> Any:
        """Return the states for the next stage [1, W, H], or on the last one what the model says of the row.

        ``received`` is [1, W, H]; on the first stage anything.
        """
        row = self._rows.popleft()
        num_tokens = len(row.token_ids_T)
        model: Readable = self.model
        if self._entry is None:
            hidden = model.states(row)
        else:
            own = received[:, :num_tokens]
            self._entry.received = own
            hidden = model.states(row, own)
            self._entry.received = None
        if self.is_last:
            answer = model.read(hidden[0], row)
            self.answers.append(tree_map(torch.Tensor.detach, answer))
            return answer
        return F.pad(hidden, (0, 0, 0, self._width - num_tokens))


class StagedModel(nn.Module):
    """The stages of a model that this rank holds, under the names of the whole one."""

    def __init__(
        self,
        decoder: Any,
        dims: ParallelDims,
        *,
        dtype: torch.dtype,
        stages_per_rank: int,
        wrap: Callable[[nn.Module], nn.Module],
    ) -> None:
        """Cut a whole decoder and keep this rank's stages. They are not sharded yet.

        Args:
            dtype: of the states between stages.
            wrap: makes a ``Readable`` of a decoder.

        Raises:
            UserError: it has fewer layers than the pipeline has stages, or weights that belong to no stage.
        """
        super().__init__()
        self.config = decoder.config
        self.flops: DecoderFlops = decoder_flops(decoder)
        self.dtype = dtype
        self.num_stages = dims.sizes[PP] * stages_per_rank
        self.pp_group: dist.ProcessGroup = dims.mesh.get_group(PP)
        """The ranks that hold the stages of one replica, first stage first."""
        self.own_numbers = list(range(dims.pp_rank, self.num_stages, dims.sizes[PP]))
        self._dims = dims
        whole = dict(decoder.named_parameters())
        self.shapes: dict[str, torch.Size] = {name: parameter.shape for name, parameter in whole.items()}
        """Shapes of the whole decoder's parameters; tied ones come once."""
        name_of = {id(parameter): name for name, parameter in whole.items()}
        parts = divide(decoder, self.num_stages)
        held = [{name_of[id(one)] for part in own for one in part.parameters()} for own in parts]
        self._holders = {name: [number for number, names in enumerate(held) if name in names] for name in whole}
        nowhere = [name for name, holders in self._holders.items() if not holders]
        if nowhere:
            raise UserError(
                f"model: got {decoder.config.model_type} with weights outside of its layers, embedding, norm and head: "
                f"{nowhere[0]}; need a decoder without them for trainer.pipeline_parallel over 1"
            )
        self.stages = nn.ModuleList(stage_of(decoder, parts, number, wrap=wrap) for number in self.own_numbers)
        self._names = [
            {name: name_of[id(parameter)] for name, parameter in stage.decoder.named_parameters()}
            for stage in self.own_stages
        ]

    @property
    def own_stages(self) -> list[Stage]:
        """The stages of this rank, first ones first."""
        return [cast(Stage, stage) for stage in self.stages]

    @property
    def decoder(self) -> "StagedModel":
        """Itself: what stands for the decoder of a model that is not cut."""
        return self

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters under the whole decoder's names."""
        for stage, names in zip(self.own_stages, self._names, strict=True):
            for name, parameter in stage.decoder.named_parameters(remove_duplicate=remove_duplicate):
                yield (f"{prefix}." if prefix else "") + names[name], parameter

    def num_holders(self) -> dict[int, int]:
        """Return how many stages hold each of this rank's parameters, by ``id``."""
        return {id(parameter): len(self._holders[name]) for name, parameter in self.named_parameters()}

    def share_gradients(self) -> None:
        """Add the gradients of tied weights up between the two stages that hold them. A collective of the pipeline."""
        for name, parameter in self.named_parameters():
            holders = [number % self._dims.sizes[PP] for number in self._holders[name]]
            if len(holders) > 1 and parameter.grad is not None:
                (other,) = (rank for rank in holders if rank != self._dims.pp_rank)
                own = local_shard(parameter.grad)
                theirs = torch.empty_like(own)
                operations = [
                    dist.P2POp(dist.isend, own, group=self.pp_group, group_peer=other),
                    dist.P2POp(dist.irecv, theirs, group=self.pp_group, group_peer=other),
                ]
                for work in dist.batch_isend_irecv(operations):
                    work.wait()
                own.add_(theirs)

    def fetch(self, name: str, parameter: Tensor | None, dtype: torch.dtype, *, to: Collection[int]) -> Tensor | None:
        """Return a whole parameter on some ranks, None elsewhere. A collective.

        Args:
            parameter: this rank's of that name.
            to: numbers of the ranks.
        """
        owner = self._holders[name][0] % self._dims.sizes[PP]
        whole: Tensor | None = None
        if self._dims.pp_rank == owner:
            assert parameter is not None
            whole = whole_of(parameter, dtype, self._dims.all.device)
        for target, place in (divmod(one, self._dims.ranks_per_stage) for one in sorted(to)):
            if owner != target and self._dims.all.rank % self._dims.ranks_per_stage == place:  # in its pipeline
                if self._dims.pp_rank == owner:
                    assert whole is not None
                    dist.send(whole.contiguous(), group=self.pp_group, group_dst=target)
                elif self._dims.pp_rank == target:
                    whole = torch.empty(self.shapes[name], dtype=dtype, device=self._dims.all.device)
                    dist.recv(whole, group=self.pp_group, group_src=owner)
        return whole if self._dims.all.rank in to else None


def divide(decoder: Any, num_stages: int) -> list[list[nn.Module]]:
    """Return the parts with weights of every stage: layers of even cost, with what stands before and after them.

    Raises:
        UserError: there are fewer layers than stages.
    """
    layers = _layers(decoder)
    if len(layers) < num_stages:
        raise UserError(
            f"model: got {len(layers)} layers of {decoder.config.model_type} for {num_stages} stages, need one for "
            "each; lower trainer.pipeline_parallel or trainer.pipeline_stages_per_rank"
        )
    base = decoder.base_model
    children = [child for child in base.children() if any(True for _ in child.parameters())]
    place = next(place for place, child in enumerate(children) if child is base.layers)
    heads = [child for child in decoder.children() if child is not base]
    costs = [float(sum(weight.numel() for weight in layer.parameters() if weight.ndim > 1)) for layer in layers]
    # An embedding is looked up and costs nothing; the head runs on scored tokens, most of them in what is trained.
    costs[-1] += sum(weight.numel() for head in heads for weight in head.parameters())
    stages = [[layers[index] for index in part] for part in split_evenly(costs, num_parts=num_stages)]
    stages[0] += children[:place]
    stages[-1] += children[place + 1 :] + heads
    return stages


def stage_of(
    decoder: nn.Module,
    parts: Sequence[Sequence[nn.Module]],
    number: int,
    *,
    wrap: Callable[[nn.Module], nn.Module],
) -> Stage:
    """Return one stage of ``divide``'s parts. Its parameters are the whole decoder's own.

    Args:
        wrap: makes a ``Readable`` of a decoder.
    """
    layers = {id(layer) for layer in _layers(decoder)}
    memo: dict[int, Any] = {id(parameter): parameter for parameter in decoder.parameters()}
    for other, theirs in enumerate(parts):
        if other != number:
            memo |= {id(part): Skipped() if id(part) in layers else nn.Identity() for part in theirs}
    own = copy.deepcopy(decoder, memo)
    return Stage(wrap(own), own, is_first=number == 0, is_last=number == len(parts) - 1)


def split_evenly(costs: Sequence[float], *, num_parts: int) -> list[range]:
    """Return neighbours, none without a member, so that the dearest part is as cheap as can be.

    Raises:
        ValueError: there are fewer costs than parts.
    """
    if len(costs) < num_parts:
        raise ValueError(f"split: got {len(costs)} costs for {num_parts} parts, need one for each")
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[end]: of the first ``end`` in as many parts as rounds so far: the dearest, the squares, where each begins.
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}
    for _ in range(num_parts):
        best = {
            end: min(
                (max(dearest, sums[end] - sums[start]), squares + (sums[end] - sums[start]) ** 2, [*starts, start])
                for start, (dearest, squares, starts) in best.items()
                if start < end
            )
            for end in range(min(best) + 1, len(costs) + 1)
        }
    starts = best[len(costs)][2]
    return [range(start, end) for start, end in zip(starts, [*starts[1:], len(costs)], strict=True)]


def _layers(decoder: Any) -> list[nn.Module]:
    return list(decoder.base_model.layers)
