"""The ``trainer`` section: the processes that turn batches into weights, and how they divide a model."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from areal_async.config.lora import LoraSettings
from areal_async.config.section import Section
from areal_async.protocol.fields import MAX_STEP

Beta = Annotated[float, Field(ge=0, lt=1)]
"""Share of what it was that an average of AdamW's keeps in a step."""


class LayoutSettings(Section):
    """How the ranks divide a model beside the policy; ``None`` takes what ``trainer`` says."""

    pipeline_parallel: int | None = Field(default=None, ge=1)
    """Stages that its layers are cut into."""
    tensor_parallel: int | None = Field(default=None, ge=1)
    """Ranks that share the arithmetic of each of its layers."""
    replicas: int | None = Field(default=None, ge=1)
    """Copies of it, each sharded over its own ranks."""


class ReferenceTrainerSettings(LayoutSettings):
    """How the reference is divided, where ``algorithm`` has one."""


class CriticTrainerSettings(LayoutSettings):
    """How the critic is divided and learns, where ``algorithm`` has one; what is not here is as in ``trainer``."""

    lr: float | None = Field(default=None, gt=0)
    """Peak learning rate of the critic; ``None`` takes ``trainer.lr``. Critics of PPO often take several times that."""
    warmup_steps: int | None = Field(default=None, ge=0, le=MAX_STEP)
    """Training steps over which it rises from 0; ``None`` takes ``trainer.warmup_steps``."""
    max_grad_norm: float | None = Field(default=None, gt=0)
    """Norm to which the critic's gradients are scaled down; ``None`` takes ``trainer.max_grad_norm``."""


class EngineSettings(Section):
    """What every training has: how ranks divide a model, AdamW, and memory."""

    num_ranks: int = Field(default=1, ge=1)
    """Trainer processes; one per GPU."""
    num_hosts: int = Field(default=1, ge=1)
    """Hosts that they are spread over, as many on each: the first ones that ``launch`` has. Must divide ``num_ranks``;
    the ranks of one ``tensor_parallel`` group are on one host."""
    pipeline_parallel: int = Field(default=1, ge=1)
    """Ranks that the layers are cut over; a row passes from rank to rank."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Ranks that share the arithmetic of each layer; they should be of one node. Must divide the heads, those of keys
    and values too, and the width of the feed-forward layer; a vocabulary that it does not divide is not shared."""
    replicas: int = Field(default=1, ge=1)
    """Copies of the model, each sharded over its own ranks (HSDP): with one per node only gradients cross nodes."""
    lr: float = Field(default=1.0e-6, gt=0)
    """Peak learning rate of AdamW."""
    warmup_steps: int = Field(default=0, ge=0, le=MAX_STEP)
    """Training steps over which the rate rises from 0."""
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    """After the warm-up: constant, or down to 0 over all steps (``run.steps``)."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's decoupled decay, on matrices only."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """AdamW's averages."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Gradients are scaled down to this norm."""
    token_budget: int = Field(default=16384, ge=8)
    """Tokens of one packed row; the longest trajectory must fit."""
    num_threads: int = Field(default=1, ge=1)
    """CPU threads per rank: of all its work where there is no GPU, of AdamW with ``cpu_offload``."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time. Every configuration for GPUs
    that comes along has it on; off is for models that leave room, as small ones on a CPU do."""
    compile: bool = False
    """Have torch compile each layer, forward and backward, as it first runs: fewer and larger kernels between the
    matrices and attention. It needs a compiler (g++), and on a GPU triton; not with ``tensor_parallel``."""
    cpu_offload: bool = False
    """Keep parameters, gradients and AdamW's averages in the host's memory, and update them there: far less of the
    GPU's, and more time: AdamW then runs in ``num_threads`` threads. Where there is no GPU it changes nothing."""
    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type in which gradients are added up over a step's rows and over ranks; bfloat16 sends half the bytes, and
    is less exact."""

    @property
    def ranks_per_host(self) -> int:
        """Derived."""
        return self.num_ranks // self.num_hosts


class TrainerSettings(EngineSettings):
    """The processes that turn batches into weights."""

    engine: Literal["fsdp2"] = "fsdp2"
    """Fully sharded data parallel, over the ranks that ``pipeline_parallel``, ``tensor_parallel`` and ``replicas``
    leave."""
    pipeline_schedule: Literal["1f1b", "interleaved"] = "1f1b"
    """``interleaved`` gives every rank several stages: ranks wait less for each other, and send more."""
    pipeline_stages_per_rank: int = Field(default=2, ge=2)
    """Stages of each rank in the interleaved schedule; in the other each rank has one."""
    eps: float = Field(default=1e-8, ge=1e-37)
    """AdamW's epsilon; a smaller one is 0 in float32, and a weight without a gradient then no number."""
    checkpoint_every_steps: int = Field(default=10, ge=1, le=MAX_STEP)
    """Training steps between checkpoints; the last step always makes one."""
    keep_checkpoints: int = Field(default=2, ge=1)
    """Newest checkpoints kept on disk; a restart takes the newest of all."""
    keep_every_steps: int | None = Field(default=None, ge=1, le=MAX_STEP)
    """Checkpoints of steps that this divides are kept for good; ``None`` keeps none so."""
    keep_best: Literal["accuracy", "reward"] | None = None
    """Keep the best checkpoint too, named by ``checkpoints/best``, and leave its weights as ``model_best/``: by the
    mean accuracy of the first evaluation of it or of what followed it, or by the mean reward of the
    ``checkpoint_every_steps`` steps before it. ``None`` looks for none."""
    async_checkpoints: bool = True
    """Write them beside the next steps, from a copy in host memory as large as a rank's shards of parameters and
    moments; without it the steps wait, and need no copy."""
    max_restarts: int = Field(default=5, ge=0)
    """Times a crashed trainer group is started again from one checkpoint before the run ends; a newer one starts the
    count afresh."""
    elastic: bool = False
    """Where a host of ranks is gone and no other has room, train on with the others, each with its share of
    ``replicas``, from the newest checkpoint on, until it is back; without it the run waits for that host. Needs
    replicas of the model, and of the critic and the reference, that ``num_hosts`` divides."""
    critic: CriticTrainerSettings = CriticTrainerSettings()
    """The critic's own."""
    reference: ReferenceTrainerSettings = ReferenceTrainerSettings()
    """The reference's own."""
    lora: LoraSettings = LoraSettings()
    """Adapters of the policy instead of all its weights; a critic is trained whole."""

    vision: Literal["train", "freeze", "lora"] = "train"
    """What becomes of the vision tower of a model that sees: ``freeze`` leaves it as it is, without gradients and
    moments, and keeps it in ``model.dtype``; ``lora`` gives its blocks the adapters of ``lora`` too, and leaves its
    mergers as they are. Adapters need one of the two; a critic, which has none, is trained whole with ``lora``. Without
    a tower it changes nothing."""

    @model_validator(mode="after")
    def _check_layouts(self) -> Self:
        if self.vision == "lora" and not self.lora.is_on:
            raise ValueError(
                "vision: got lora with lora.rank=0, need the rank of its adapters; set lora.rank, or vision to train "
                "or freeze"
            )
        if self.num_ranks % self.num_hosts:
            raise ValueError(
                f"num_hosts: got {self.num_hosts} with num_ranks={self.num_ranks}, need as many ranks on each host; "
                "raise num_ranks to a multiple of it, or lower it"
            )
        self.lora.check_layout(pipeline_parallel=self.pipeline_parallel, tensor_parallel=self.tensor_parallel)
        for role, layout in (
            ("", self),
            ("critic.", self.for_role("critic")),
            ("reference.", self.for_role("reference")),
        ):
            whole = layout.pipeline_parallel * layout.tensor_parallel * layout.replicas
            if self.num_ranks % whole:
                raise ValueError(
                    f"num_ranks: got {self.num_ranks} with {role}pipeline_parallel={layout.pipeline_parallel}, "
                    f"{role}tensor_parallel={layout.tensor_parallel}, {role}replicas={layout.replicas}, "
                    f"need a multiple of {whole}; raise it, or lower one of these"
                )
            if self.ranks_per_host % layout.tensor_parallel:
                raise ValueError(
                    f"num_hosts: got {self.num_hosts} with num_ranks={self.num_ranks} and "
                    f"{role}tensor_parallel={layout.tensor_parallel}, need its groups within one host, "
                    f"of {self.ranks_per_host} ranks; lower num_hosts or {role}tensor_parallel"
                )
            if self.elastic and (self.num_hosts == 1 or layout.replicas % self.num_hosts):
                raise ValueError(
                    f"elastic: got true with num_hosts={self.num_hosts} and {role}replicas={layout.replicas}, need "
                    f"several hosts, and as many whole replicas for each; raise num_hosts or {role}replicas"
                )
            if self.compile and layout.tensor_parallel > 1:
                raise ValueError(
                    f"compile: got true with {role}tensor_parallel={layout.tensor_parallel}, need one of the two: its "
                    f"ranks meet inside of each layer; set compile to false, or {role}tensor_parallel to 1"
                )
        return self

    @property
    def stages_per_rank(self) -> int:
        """Derived: stages of a pipeline on each of its ranks."""
        return self.pipeline_stages_per_rank if self.pipeline_schedule == "interleaved" else 1

    def on_hosts(self, num_hosts: int) -> "TrainerSettings":
        """Return these settings for fewer hosts, each with as many ranks and replicas as before."""

        def fewer(replicas: int | None) -> int | None:
            return None if replicas is None else replicas * num_hosts // self.num_hosts

        roles = {
            name: one.model_copy(update={"replicas": fewer(one.replicas)})
            for name, one in (("critic", self.critic), ("reference", self.reference))
        }
        num_ranks = self.ranks_per_host * num_hosts
        size = {"num_hosts": num_hosts, "num_ranks": num_ranks, "replicas": fewer(self.replicas), "elastic": False}
        return self.model_copy(update=size | roles)

    def for_role(self, role: Literal["critic", "reference"]) -> "TrainerSettings":
        """Return these settings as the engine of a role takes them."""
        own: LayoutSettings = getattr(self, role)
        changed = own.model_dump(exclude_none=True)
        if role == "critic":  # has no adapters
            changed |= {"lora": LoraSettings(), "vision": "freeze" if self.vision == "freeze" else "train"}
        return self.model_copy(update=changed)
