"""Training adapters instead of the whole model (LoRA)."""

from typing import Literal

from pydantic import Field

from areal_async.config.section import Section


class LoraSettings(Section):
    """Low-rank adapters of the policy's linear layers (Hu et al. 2021, arXiv 2106.09685), in PEFT's format.

    What they are trained over is kept in ``model.dtype``; adapters, their gradients and moments are float32. There is
    no dropout: the logprobs trained on must be those that the servers report.
    """

    rank: int = Field(default=0, ge=0)
    """Width of an adapter; 0 for none: the whole model is trained."""
    alpha: float = Field(default=32.0, gt=0)
    """An adapter's output is multiplied by ``alpha / rank``."""
    target_modules: tuple[str, ...] | None = Field(default=None, min_length=1)
    """The linear modules of the layers that are adapted, by the last part of their names (``q_proj``); ``None`` adapts
    all. With ``vision: lora`` those of the tower's blocks too, of which it names some then."""
    transfer: Literal["auto", "adapter", "merged"] = "auto"
    """How the servers get a version: the adapter alone, which they merge into their copy of ``model.path``, or the
    whole weights merged. ``auto`` takes the adapter where they can: the embedded engine's, with
    ``inference.weight_transfer: disk``."""

    @property
    def is_on(self) -> bool:
        """Derived: adapters are trained, and nothing else is."""
        return self.rank > 0

    @property
    def scale(self) -> float:
        """Derived: what an adapter's output is multiplied by."""
        return self.alpha / self.rank

    def check_layout(self, *, pipeline_parallel: int, tensor_parallel: int) -> None:
        """Refuse layouts in which adapters are not trained.

        Raises:
            ValueError: it is one.
        """
        split = {"pipeline_parallel": pipeline_parallel, "tensor_parallel": tensor_parallel}
        for name, size in split.items():
            if self.is_on and size > 1:
                raise ValueError(
                    f"lora.rank: got {self.rank} with {name}={size}, need {name}=1; adapters are trained beside whole "
                    "layers, sharded (num_ranks) or copied (replicas)"
                )

    def check_servers(self, *, backend: str, transfer: str) -> None:
        """Refuse to send adapters alone to servers that take only whole weights.

        Raises:
            ValueError: they do.
        """
        if not self.is_on or self.transfer != "adapter":
            return
        given = (("inference.weight_transfer", transfer, "distributed"), ("inference.backend", backend, "sglang"))
        for name, value, takes_whole in given:
            if value == takes_whole:
                raise ValueError(
                    f"trainer.lora.transfer: got adapter with {name}={value}, need merged or auto; the servers then "
                    "take whole weights only"
                )
