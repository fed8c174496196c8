"""The arithmetic of each layer on several ranks, which hold a part of every matrix each and the same rows.

Queries, keys, values, gate and up are cut by their outputs, so that a part has heads and features of its own; what
goes back into the stream of hidden states is cut by its inputs and summed. The vocabulary is cut into ranges of words
where it divides: nobody ever holds a token's logits in full. Everything that is not a matrix is held by all parts, and
so is the stream.

The parameters are DTensors of the parts' mesh, which FSDP2 then shards further; the arithmetic is on their local
tensors. Legend: S scored tokens of a row, H hidden, V vocabulary, W words of a part.

Source: Shoeybi et al. 2019 (Megatron-LM), arXiv 1909.08053, section 3.
"""

import functools
import logging
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from areal_async.errors import UserError
from areal_async.trainer.engine.parallel.dims import local_shard
from areal_async.trainer.packing.flops import language_model

OUTPUTS_CUT = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
INPUTS_CUT = ("o_proj", "down_proj")


def divide_decoder(decoder: Any, mesh: DeviceMesh) -> None:
    """Leave this rank its part of the decoder's matrices. No collective.

    Layers, embedding and head may each be absent: what is there is divided. Before anything is sharded, and while
    parameters are on the meta device: the whole of a matrix never is in memory.

    Args:
        mesh: of the parts, one dimension.

    Raises:
        UserError: they cannot be divided so.
    """
    check_divisible(decoder, mesh.size())
    # It warns that such a parameter is gathered in two collectives, which is how it lies.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    parts = _MatrixParts(mesh)
    for layer in _layers(decoder):
        for name, linear in _linears(layer):
            parts.cut_linear(linear, by_inputs=name in INPUTS_CUT)
        for block in layer.modules():
            if any(hasattr(block, name) for name in OUTPUTS_CUT):
                block.register_forward_pre_hook(parts.enter, with_kwargs=True)
    embedding = decoder.get_input_embeddings()
    head = None if hasattr(decoder, "score") else decoder.get_output_embeddings()  # of a critic there is none
    # An embedding of another type does more than look up, and what is tied to it cannot be cut without it.
    is_plain = type(embedding) in (nn.Embedding, nn.Identity)
    if is_plain and decoder.config.get_text_config().vocab_size % mesh.size() == 0:
        if isinstance(embedding, nn.Embedding):
            parts.cut_embedding(embedding)
        if isinstance(head, nn.Linear):
            parts.cut_head(head)


def check_divisible(decoder: Any, parts: int) -> None:
    """Raise UserError where the layers cannot be divided into so many parts."""
    config = decoder.config.get_text_config()
    for layer in _layers(decoder):
        names = sorted(name for name, _ in _linears(layer))
        if names != sorted((*OUTPUTS_CUT, *INPUTS_CUT)):
            raise UserError(
                f"trainer.tensor_parallel: got {parts} for a {config.model_type} whose layers hold {', '.join(names)}; "
                f"need {', '.join((*OUTPUTS_CUT, *INPUTS_CUT))}, one of each, as in Qwen2, Qwen3 or Llama; set it to 1"
            )
        wide = [name for name, one in _head_norms(layer) if _width(one) != _head_width(config)]
        if wide:
            raise UserError(
                f"trainer.tensor_parallel: got {parts} for a {config.model_type}, whose {wide[0]} is over all heads "
                "at once; need norms of single heads, or none, as Qwen2, Qwen3 or Llama have; set it to 1"
            )
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
        size = getattr(config, name)
        if size % parts:
            raise UserError(
                f"trainer.tensor_parallel: got {parts} for a model with {name}={size}, need a number that divides it"
            )


def is_divided(head: nn.Linear) -> bool:
    """Return whether the head gives the logits of a part of the words only. While its weight is not sharded."""
    return isinstance(head.weight, DTensor)


def num_local_words(head: nn.Linear) -> int:
    """Return how many words this rank gives the logits of."""
    return len(local_shard(head.weight))


def divided_scores(head: nn.Linear, logits_SW: Tensor, targets_S: Tensor) -> tuple[Tensor, Tensor]:
    """Return logprob and entropy [S] of the distribution over all words, of whose logits each part has its own.

    The same on every part, and so must be the gradients that come back. A collective of the parts.
    """
    mesh = cast(DTensor, head.weight).device_mesh
    first = mesh.get_local_rank() * logits_SW.shape[1]
    return cast(tuple[Tensor, Tensor], _DividedScores.apply(logits_SW, targets_S - first, mesh.get_group()))  # type: ignore[no-untyped-call]


def sum_over_tp(model: nn.Module, parts: dist.ProcessGroup) -> None:
    """Complete the gradients of what all parts hold, but each used on its own heads alone: the heads' norms."""
    gradients = [local_shard(one.grad) for one in _head_parameters(model) if one.grad is not None]
    if gradients:
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=parts)
        for gradient, total in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
            gradient.copy_(total.view_as(gradient))


class _MatrixParts:
    """This rank's part of each matrix, and the ranks that hold the others."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._group = mesh.get_group()
        self._divided: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        """Id of a parameter -> itself, which keeps the id from being given to another, and its part."""

    def enter(self, _block: nn.Module, arguments: Any, named: Any) -> tuple[Any, Any]:
        """Let the gradients of all parts flow back into the stream, once for all matrices that it goes into."""
        if arguments:
            return (_spread(arguments[0], self._group), *arguments[1:]), named
        return arguments, named | {"hidden_states": _spread(named["hidden_states"], self._group)}

    def cut_linear(self, linear: nn.Linear, *, by_inputs: bool) -> None:
        self._cut(linear, "weight", dim=1 if by_inputs else 0)
        if by_inputs:
            linear.forward = functools.partial(self._summed, linear)  # type: ignore[method-assign]
            return
        if linear.bias is not None:
            self._cut(linear, "bias", dim=0)
        linear.forward = functools.partial(_of_part, linear)  # type: ignore[method-assign]

    def cut_embedding(self, embedding: nn.Embedding) -> None:
        self._cut(embedding, "weight", dim=0)
        embedding.forward = functools.partial(self._embedded, embedding)  # type: ignore[method-assign]

    def cut_head(self, head: nn.Linear) -> None:
        self.cut_linear(head, by_inputs=False)
        head.register_forward_pre_hook(self.enter, with_kwargs=True)

    def _cut(self, module: nn.Module, name: str, *, dim: int) -> None:
        whole: nn.Parameter = getattr(module, name)
        if id(whole) not in self._divided:  # tied ones stay tied
            # Without a source every rank takes its part of what it has.
            part = distribute_tensor(whole.detach(), self._mesh, [Shard(dim)], src_data_rank=None)
            self._divided[id(whole)] = (whole, nn.Parameter(part, requires_grad=whole.requires_grad))
        setattr(module, name, self._divided[id(whole)][1])

    def _summed(self, linear: nn.Linear, part: Tensor) -> Tensor:
        outputs = _sum(F.linear(part, local_shard(linear.weight)), self._group)
        return outputs if linear.bias is None else outputs + linear.bias

    def _embedded(self, embedding: nn.Embedding, token_ids: Tensor) -> Tensor:
        weight_WH = local_shard(embedding.weight)
        first = self._mesh.get_local_rank() * len(weight_WH)
        words = token_ids - first
        is_other = (words < 0) | (words >= len(weight_WH))
        # A padding word is never learned; to the ranks that do not have it, it is no word.
        padding = -1 if embedding.padding_idx is None else embedding.padding_idx - first
        own = F.embedding(
            words.masked_fill(is_other, 0), weight_WH, padding_idx=padding if 0 <= padding < len(weight_WH) else None
        )
        return _sum(own.masked_fill(is_other[..., None], 0.0), self._group)


class _CopyToParts(torch.autograd.Function):
    """What all parts hold, as the input of each one's share of the work."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _total(gradients[0], ctx.group), None


class _Sum(torch.autograd.Function):
    """What the parts have made of their shares, added up on all of them."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _total(part, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _DividedScores(torch.autograd.Function):
    """Logprob and entropy over words that lie on several ranks.

    With p the probabilities and t the target, d logprob / d logit_v = [v = t] - p_v and
    d entropy / d logit_v = -p_v (log p_v + entropy).
    """

    @staticmethod
    def forward(ctx: Any, logits_SW: Tensor, targets_S: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        """``targets_S`` counts from this part's first word: outside of it there are others'."""
        most_S = logits_SW.amax(-1)
        dist.all_reduce(most_S, op=dist.ReduceOp.MAX, group=group)
        shifted_SW = logits_SW - most_S[:, None]
        weights_SW = shifted_SW.exp()
        is_own_S = (targets_S >= 0) & (targets_S < logits_SW.shape[1])
        own_S = targets_S.masked_fill(~is_own_S, 0)
        target_S = shifted_SW.gather(1, own_S[:, None])[:, 0].masked_fill(~is_own_S, 0.0)
        sums_3S = torch.stack([weights_SW.sum(-1), (weights_SW * shifted_SW).sum(-1), target_S])
        dist.all_reduce(sums_3S, group=group)
        total_S, weighted_S, target_S = sums_3S
        log_total_S = total_S.log()
        entropy_S = log_total_S - weighted_S / total_S
        ctx.save_for_backward(shifted_SW.sub_(log_total_S[:, None]), entropy_S, own_S, is_own_S)
        return target_S - log_total_S, entropy_S

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        log_probs_SW, entropy_S, own_S, is_own_S = ctx.saved_tensors
        of_logprob_S, of_entropy_S = gradients
        factors_SW = of_entropy_S[:, None] * (log_probs_SW + entropy_S[:, None]) + of_logprob_S[:, None]
        gradient_SW = factors_SW.mul_(log_probs_SW.exp()).neg_()
        gradient_SW.scatter_add_(1, own_S[:, None], (of_logprob_S * is_own_S)[:, None])
        return gradient_SW, None, None


def _layers(decoder: Any) -> Iterator[nn.Module]:
    """Yield the layers that are there: of a stage's decoder the others have no parameters."""
    for layer in language_model(decoder).layers:
        if any(True for _ in layer.parameters()):
            yield layer


def _linears(layer: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the matrices of a layer, by the last part of their names."""
    for name, module in layer.named_modules():
        if isinstance(module, nn.Linear):
            yield name.rpartition(".")[2], module


def _head_norms(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield what stands beside the matrices of attention and has parameters."""
    for module in model.modules():
        if hasattr(module, "q_proj"):
            for name, child in module.named_children():
                if not isinstance(child, nn.Linear) and any(True for _ in child.parameters()):
                    yield name, child


def _head_parameters(model: nn.Module) -> Iterator[nn.Parameter]:
    for _, norm in _head_norms(model):
        yield from norm.parameters()


def _head_width(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _width(norm: nn.Module) -> int:
    return max(parameter.shape[-1] for parameter in norm.parameters())


def _of_part(linear: nn.Linear, whole: Tensor) -> Tensor:
    return F.linear(whole, local_shard(linear.weight), None if linear.bias is None else local_shard(linear.bias))


def _total(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    total = part.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _spread(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    return cast(Tensor, _CopyToParts.apply(whole, group))  # type: ignore[no-untyped-call]


def _sum(part: Tensor, group: dist.ProcessGroup) -> Tensor:
    return cast(Tensor, _Sum.apply(part, group))  # type: ignore[no-untyped-call]
