"""Every setting of a run, frozen, with its unit and the meaning of ``None`` or 0 under it.

Sources, later ones win: YAML file, ``AREAL_ASYNC_*`` environment (``__`` nests), ``--section.key value``
(``sources``). Numbers that follow from others are properties and are never typed.
"""

from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from areal_async.config.algorithm import AlgorithmSettings as AlgorithmSettings
from areal_async.config.endpoint import EndpointSettings as EndpointSettings
from areal_async.config.endpoint import ServeSettings as ServeSettings
from areal_async.config.health import GateSettings as GateSettings
from areal_async.config.health import HealthSettings as HealthSettings
from areal_async.config.launch import LaunchSettings as LaunchSettings
from areal_async.config.lora import LoraSettings as LoraSettings
from areal_async.config.metrics import MetricsSettings as MetricsSettings
from areal_async.config.policy import TRUNCATION_REMEDY, check_arms, check_names, refuse_own_servers
from areal_async.config.policy import ArmSettings as ArmSettings
from areal_async.config.policy import ModelSettings as ModelSettings
from areal_async.config.policy import OtherModelSettings as OtherModelSettings
from areal_async.config.policy import PolicySettings as PolicySettings
from areal_async.config.policy import SamplingSettings as SamplingSettings
from areal_async.config.section import LocalPath, Options, OutputPath, ProgramPath
from areal_async.config.section import Section as Section
from areal_async.config.tasks import CurriculumSettings as CurriculumSettings
from areal_async.config.tasks import DatasetSettings as DatasetSettings
from areal_async.config.tasks import EvalSettings as EvalSettings
from areal_async.config.tasks import TaskSettings as TaskSettings
from areal_async.config.tasks import check_env
from areal_async.config.template import TemplateSettings as TemplateSettings
from areal_async.config.trainer import CriticTrainerSettings as CriticTrainerSettings
from areal_async.config.trainer import TrainerSettings as TrainerSettings
from areal_async.protocol.fields import MAX_SERVER_RANKS, MAX_STEP
from areal_async.protocol.staleness import max_groups_in_flight
from areal_async.protocol.subjects import RUN_NAME, Names

TICKET_ACK_WAIT_S = 30.0
"""A ticket whose node is silent for this long is given to another."""
TRAJECTORY_ACK_WAIT_S = 86_400.0
"""Trajectories stay un-acked until a checkpoint holds them; a lineage fences by its own consumer, not by time."""
MIN_DUPLICATE_WINDOW_S = 120.0
"""Seconds, the least, so that a process that repeats a message after a restart stores none twice."""
MESSAGE_BYTES = 1 << 20
"""Trajectories that are ready together travel together up to this size."""
MESSAGE_OVERHEAD_BYTES = 64 << 10
"""Subject, headers and record of a message, at the most."""
MAX_PAYLOAD_BYTES = 9 << 20
"""The broker's limit: one trajectory of ``max_trajectory_bytes`` and its headers must fit."""
SCARCE_SHARE = 0.8
"""How full a stream of trajectories or of images is when the trainer begins to make room there."""
MIN_IMAGE_STREAM_BYTES = 8 << 20
"""The least that holds a chunk of an image in what ``SCARCE_SHARE`` leaves."""
MAX_CREDIT_BYTES = 16 << 10
"""Rewards of the single replies of one trajectory, at the most; they travel in headers, which hold 64 KB."""
CUT_CREDIT_BYTES = 6 << 20
"""Rewards of the single replies of all trajectories of one cut, at the most; a cut is one message."""


HeldOut = tuple[TaskSettings, DatasetSettings, int]
"""A task that is evaluated, its rows, and how many of them are taken."""


class RunSettings(Section):
    """One experiment."""

    name: str = "run"
    """Name of the run, 1 to 48 of ``a-z 0-9 _ -``; names its directory, subjects and streams. Left out, it is that of
    the workflow."""
    steps: int = Field(default=200, ge=1, le=MAX_STEP)
    """Training steps in all."""
    seed: int = 1
    """Seeds the order of the data, the sampling of the servers and the optimizer's noise."""
    watchdog_s: float = Field(default=120.0, gt=0)
    """Seconds without any progress after which the run says who waits for whom; a step may not take longer."""
    on_stall: Literal["report", "restart", "end"] = "report"
    """Consequence of that: nothing more, the culprit's process is started again, or the run ends with that cause."""
    directory: OutputPath = Path("runs")
    """Where run directories are made; relative to the working directory, in a YAML file too."""
    max_failed_groups: int = Field(default=20, ge=1)
    """This many failed groups, one after another with no other outcome between, end the run with their cause."""

    @field_validator("name")
    @classmethod
    def _name(cls, name: str) -> str:
        if not RUN_NAME.fullmatch(name):
            raise ValueError(f"got {name!r}, need 1 to 48 characters of a-z 0-9 _ -; choose another run.name")
        return name


class RolloutSettings(Section):
    """What is sampled, and how old it may be."""

    group_size: int = Field(default=8, ge=1)
    """Siblings per prompt."""
    min_group_size: int = Field(default=4, ge=1)
    """Scored siblings below which a group is not trained."""
    batch_groups: int = Field(default=32, ge=1)
    """Groups per training step."""
    max_staleness: int = Field(default=2, ge=0, le=MAX_STEP)
    """Oldest weights a trained token may come from, in versions. 0 is truly on-policy."""
    admission: Literal["fresh", "eager"] = "eager"
    """Within the credit that ``max_staleness`` gives, groups are admitted as early as they may be, or (``fresh``) as
    late as the trainer need not wait for them, so that their tokens are young."""
    when_stale: Literal["wait", "mask", "drop"] = "wait"
    """``wait`` for due groups, ``mask`` over-age tokens out of the loss, or ``drop`` the group (favours the short)."""
    max_attempts: int = Field(default=3, ge=1)
    """Failed attempts at one prompt before it is recorded dead."""
    episode_deadline_s: float = Field(default=600.0, gt=0)
    """Seconds after which a node stores an unfinished sibling as failed."""
    setup_deadline_s: float = Field(default=300.0, gt=0)
    """Seconds that what a workflow's file has made once per node (``@per_node``) may take to be made."""
    loop_deadline_s: float = Field(default=20.0, ge=5)
    """Seconds one workflow may hold up its node's event loop; then the node ends itself, and that slot has failed."""
    sampling: SamplingSettings = SamplingSettings()
    accept_truncation_bias: bool = False
    """Train tokens all the same that ``top_p``, ``top_k``, ``min_p`` or a temperature of 0 kept others from being. The
    gradient is biased: logprobs are those of the whole distribution. What is only evaluated needs no leave."""
    template: TemplateSettings = TemplateSettings()
    curriculum: CurriculumSettings = CurriculumSettings()
    max_trajectories_per_node: int = Field(default=512, ge=1)
    """Workflows running at once on one node."""
    max_boxes: int = Field(default=64, ge=1)
    """Boxes (``areal_async.sandbox.sandbox``) open at once on one node; a workflow that wants one more waits."""
    max_trajectory_bytes: int = Field(default=8 << 20, ge=1 << 10, le=8 << 20)
    """Largest trajectory that is stored; a larger one is a recorded failure."""
    linger_ms: float = Field(default=20.0, ge=0)
    """How long a finished sibling waits for others to travel with."""
    max_stream_bytes: int = Field(default=4 << 30, ge=1 << 20)
    """Disk for trajectories that are not trained yet; when full, producers wait. A group of the largest must fit."""
    max_image_stream_bytes: int = Field(default=1 << 30, ge=MIN_IMAGE_STREAM_BYTES)
    """Disk for images of groups that are not trained yet; from 80 % of it on the trainer makes room, and no group is
    admitted that shows one."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_group_size > self.group_size:
            raise ValueError(
                f"min_group_size must not exceed group_size, got min_group_size={self.min_group_size}, "
                f"group_size={self.group_size}; else no group could ever train"
            )
        need_bytes = self.group_size * self.max_trajectory_bytes + self.max_message_bytes
        if self.max_stream_bytes < need_bytes:
            raise ValueError(
                f"max_stream_bytes: got {self.max_stream_bytes}, need at least {need_bytes}, room for a group of "
                f"{self.group_size} trajectories of max_trajectory_bytes={self.max_trajectory_bytes} and one message; "
                "raise it, or lower max_trajectory_bytes"
            )
        return self

    @property
    def max_message_bytes(self) -> int:
        """Derived: the largest message that a producer may be waiting to store."""
        return self.max_payload_bytes + MESSAGE_OVERHEAD_BYTES

    @property
    def max_payload_bytes(self) -> int:
        """Derived: the most that one message holds of a group's trajectories."""
        return max(self.max_trajectory_bytes, min(MESSAGE_BYTES, self.group_size * self.max_trajectory_bytes))

    @property
    def max_credit_bytes(self) -> int:
        """Derived: the most that the rewards of one trajectory's replies may take in its header."""
        return min(MAX_CREDIT_BYTES, CUT_CREDIT_BYTES // (self.max_groups_in_flight * self.group_size))

    @property
    def max_groups_in_flight(self) -> int:
        """Derived: groups admitted and not settled, at the most."""
        return max_groups_in_flight(max_staleness=self.max_staleness, batch_groups=self.batch_groups)

    @property
    def group_deadline_s(self) -> float:
        """Derived: how long a trainer that waits for a group gives it before recording it failed."""
        return self.episode_deadline_s + 60.0


NUM_SILENCES = 6
"""Times ``start_deadline_s`` that a start may take in all."""

DISK_EVERY = 10
"""Default of ``inference.disk_every`` where weights are broadcast."""


class InferenceSettings(Section):
    """The servers of each node."""

    backend: Literal["auto", "sglang", "embedded"] = "auto"
    """``auto`` takes SGLang where ``python`` is set or a GPU and SGLang are found, else the embedded engine."""
    python: ProgramPath | None = None
    """Interpreter of the environment SGLang is installed in; ``None`` for the one that runs this."""
    num_servers: int = Field(default=1, ge=1)
    """Servers per node."""
    tensor_parallel: int = Field(default=1, ge=1, le=MAX_SERVER_RANKS)
    """GPUs per server."""
    colocate: Literal["split", "release"] | None = None
    """How servers and trainer share the same GPUs: each in its part of the memory (``split``), or in turns, servers
    paused and without their cache during each training step (``release``). ``None`` gives each side GPUs of its own."""
    interrupt: Literal["retract", "in_place", "abort"] = "retract"
    """What happens to running requests while weights are swapped: recomputed, kept as they are, or ended and resent."""
    weight_transfer: Literal["disk", "distributed"] = "disk"
    """How weights reach the servers: as files, or by a broadcast from the trainer (nccl between GPUs, else gloo)."""
    disk_every: int | None = Field(default=None, ge=1)
    """Versions from one whole copy on disk to the next; ``None`` for 1 by ``disk``, and 10 by ``distributed``, where
    copies also come with checkpoints and when a server needs one."""
    transfer_deadline_s: float = Field(default=120.0, gt=0)
    """Seconds one broadcast of the weights may take; then its servers are fenced and repaired."""
    bucket_bytes: int = Field(default=512 << 20, ge=1 << 10)
    """Largest part of the weights that is broadcast at once; both sides hold one in memory."""
    num_threads: int = Field(default=1, ge=1)
    """CPU threads of one server where there is no GPU."""
    context_length: int | None = None
    """Longest prompt and answer together, in tokens; ``None`` takes the model's."""
    max_running_requests: int = Field(default=256, ge=1)
    """Requests one server decodes at once."""
    stream_interval: int = Field(default=8, ge=1)
    """Tokens per streamed event: fewer events cost less on both sides."""
    flags: tuple[str, ...] = ()
    """Passed on to the server as they are."""
    tool_call_parser: str | None = None
    """SGLang's parser that finds the tool calls in replies, by its name there (``qwen25``, ``llama3``, ...), asked for
    each reply to a model with tools; ``None`` finds them here, by the format that the model's chat template teaches."""
    first_token_deadline_s: float = Field(default=300.0, gt=0)
    """Seconds from sending a request to its first event. A server that gives nobody a token while one waits for so long
    is started anew, whatever it says of its health."""
    between_tokens_deadline_s: float = Field(default=120.0, gt=0)
    """Seconds between two events of one stream; with the same consequence."""
    total_deadline_s: float | None = Field(default=None, gt=0)
    """Seconds one completion may take in all, waiting for a server included; ``None`` leaves that to its episode's."""
    start_deadline_s: float = Field(default=600.0, gt=0)
    """Seconds for which a server that is not healthy yet may add nothing to its log; in all it may take six times as
    long: kernels are compiled, and weights may have to be downloaded."""

    @property
    def start_bound_s(self) -> float:
        """Derived: seconds a server may take until it is healthy, however much it has to say."""
        return NUM_SILENCES * self.start_deadline_s

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.colocate == "release" and self.interrupt != "retract":
            raise ValueError(
                f"interrupt: got {self.interrupt} with colocate=release, need retract: a server gives its cache "
                "back only when no request holds a part of it"
            )
        if self.colocate is not None and self.weight_transfer == "distributed":
            raise ValueError(
                f"weight_transfer: got distributed with colocate={self.colocate}, need disk: nccl takes no "
                "two ranks on one GPU"
            )
        if self.weight_transfer == "disk" and self.disk_interval > 1:
            raise ValueError(
                f"disk_every: got {self.disk_every} with weight_transfer=disk, need 1, as servers get every version "
                "from there; set it to 1, or weight_transfer to distributed"
            )
        return self

    @property
    def disk_interval(self) -> int:
        """Derived: versions from one whole copy on disk to the next, at the most."""
        return self.disk_every or (1 if self.weight_transfer == "disk" else DISK_EVERY)

    @property
    def num_gpus(self) -> int:
        """Derived: GPUs per node, where there are any."""
        return self.num_servers * self.tensor_parallel


class BusSettings(Section):
    """The broker."""

    url: str = "embedded"
    """``embedded`` starts a nats-server of our own; else ``nats://host:port`` or ``tls://host:port``, of a cluster
    several with commas between."""
    replicas: int = Field(default=1, ge=1, le=5)
    """Copies of what is stored, on as many servers of an external cluster: 1, 3 or 5. Three
    outlive the loss of any one server."""
    credentials: LocalPath | None = None
    """Credentials file for an external broker, an nkey's seed or ``.creds``, of mode 600; a folder with one for each
    role (``node.nk``; ``python -m areal_async.bus`` makes them); ``None`` for none."""
    ca: LocalPath | None = None
    """PEM file of the authority that signed an external broker's certificate; ``None`` trusts the system's."""
    monitor_url: str | None = None
    """An external broker's monitoring page: ``doctor`` sees there how it syncs; ``None`` tries port 8222."""
    host: str | None = None
    """Address of the launcher's host at which the embedded broker listens; ``None`` takes the loopback, and one that
    all hosts reach where ``launch.backend`` has several."""
    http_port: int = Field(default=0, ge=0, le=65535)
    """Port of the embedded broker's monitoring page; 0 takes a free one."""
    port: int = Field(default=0, ge=0, le=65535)
    """Port of the embedded broker; 0 takes a free one."""
    max_disk_bytes: int = Field(default=16 << 30, ge=1 << 26)
    """Disk the embedded broker may take in all."""
    operation_deadline_s: float = Field(default=60.0, gt=0)
    """Seconds a bus operation is retried, through restarts of the broker, before its process ends."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.replicas % 2 == 0:
            raise ValueError(f"replicas: got {self.replicas}, need 1, 3 or 5: a majority must be left without one")
        if self.replicas > 1 and self.url == "embedded":
            raise ValueError(f"replicas: got {self.replicas} with an embedded broker, need bus.url of a cluster")
        return self


class Settings(Section):
    """A whole run."""

    run: RunSettings = RunSettings()
    tasks: tuple[TaskSettings, ...] = ()
    env: Options = {}
    """Options of the tasks' environments, by the names that each kind of environment has for them."""
    eval: EvalSettings = EvalSettings()
    model: ModelSettings = ModelSettings()
    rollout: RolloutSettings = RolloutSettings()
    policies: dict[str, PolicySettings] = {}
    """Policies that workflows take beside ``policy``, by the name of the parameter."""
    arms: dict[str, ArmSettings] = {}
    """Models that answer additional prompts, by the names of the arms."""
    endpoint: EndpointSettings = EndpointSettings()
    inference: InferenceSettings = InferenceSettings()
    algorithm: AlgorithmSettings = AlgorithmSettings()
    trainer: TrainerSettings = TrainerSettings()
    metrics: MetricsSettings = MetricsSettings()
    health: HealthSettings = HealthSettings()
    gate: GateSettings = GateSettings()
    launch: LaunchSettings = LaunchSettings()
    serve: ServeSettings = ServeSettings()
    bus: BusSettings = BusSettings()

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [task.name for task in self.tasks]
        if len(set(names)) < len(names):
            raise ValueError(f"tasks: got workflows named {names}, need a different name for each")
        if self.tasks and not any(task.ratio for task in self.tasks):
            raise ValueError(
                "tasks: got a ratio of 0 for every one, need one over 0 at least; else nothing is admitted"
            )
        check_env(self.env, self.tasks)
        check_names(self.policies)
        check_arms(self.arms)
        if self.inference.colocate is not None:
            refuse_own_servers(self.frozen_policies, self.arms, colocate=self.inference.colocate)
        self.trainer.lora.check_servers(backend=self.inference.backend, transfer=self.inference.weight_transfer)
        for rollout in (self.rollout, *map(self._checked_rollout, range(len(self.tasks)))):
            self.algorithm.check_run(max_new_tokens=rollout.sampling.max_new_tokens)
        if self.eval.dataset is not None and self.tasks and self.tasks[0].eval.dataset is not None:
            raise ValueError("eval.dataset: got one beside tasks.0.eval.dataset, need one of them; leave the other out")
        for task, _, _ in self.held_out if self.eval.samples > 1 else ():
            if not self.rollout_of(task.name).sampling.temperature:
                raise ValueError(
                    f"eval.samples: got {self.eval.samples} with a temperature of 0 for {task.name}, which answers "
                    "alike each time, need 1; or raise rollout.sampling.temperature"
                )
        has_held_out = self.eval.dataset is not None or any(task.eval.dataset is not None for task in self.tasks)
        if self.trainer.keep_best == "accuracy" and not (has_held_out and self.eval.every_steps):
            raise ValueError(
                f"trainer.keep_best: got accuracy with eval.every_steps={self.eval.every_steps} and "
                f"{'a' if has_held_out else 'no'} held-out data set, need evaluations; set eval, or take reward"
            )
        self.gate.check_run(self.eval, has_held_out=has_held_out)
        for role, layout, remedy in (
            ("critic", self.trainer.critic, "a preset with a critic, as ppo"),
            ("reference", self.trainer.reference, "kl_coef over 0"),
        ):
            usual = type(layout)()
            given = [(f"trainer.{role}.{name}", one) for name, one in layout if one != getattr(usual, name)]
            if (path := getattr(self.model, role).path) is not None:
                given = [(f"model.{role}", path), *given]
            if given and role not in self.algorithm.needs_models:
                name, value = given[0]
                raise ValueError(
                    f"{name}: got {value} with algorithm.name={self.algorithm.name}, "
                    f"kl_coef={self.algorithm.kl_coef:g}, which has no {role}; leave it out, or choose {remedy}"
                )
        return self

    def _checked_rollout(self, index: int) -> RolloutSettings:
        """Return the rollout of a task as it would be checked if it were the run's."""
        task, rollout = self.tasks[index], self.rollout
        is_longer = task.sampling.max_new_tokens not in (None, rollout.sampling.max_new_tokens)
        if is_longer and self.algorithm.overlong_cache != 0 and self.algorithm.overlong_max is None:
            raise ValueError(
                f"tasks.{index}.sampling.max_new_tokens: got {task.sampling.max_new_tokens} with "
                f"algorithm.name={self.algorithm.name}, which takes off from answers near the longest, need one length "
                "for all tasks; set algorithm.overlong_max"
            )
        try:
            return RolloutSettings.model_validate(self.rollout_of(task.name).model_dump())
        except ValidationError as exc:
            reason = exc.errors()[0]["msg"].removeprefix("Value error, ")
            raise ValueError(f"tasks.{index}: {reason}") from exc

    def rollout_of(self, workflow: str) -> RolloutSettings:
        """Return ``rollout`` as it is for one task: with what the task has otherwise put in."""
        changes = next((task.changes for task in self.tasks if task.name == workflow), {})
        if not changes:
            return self.rollout
        sampling = self.rollout.sampling.model_copy(update=changes.get("sampling", {}))
        return self.rollout.model_copy(update={**changes, "sampling": sampling})

    def eval_sampling_of(self, workflow: str) -> SamplingSettings:
        """Return how held-out rows of one task are answered: greedily, or as in training where each has several."""
        sampling = self.rollout_of(workflow).sampling
        return sampling if self.eval.samples > 1 else sampling.greedy

    def check_trained_sampling(self) -> None:
        """Hold the sampling of what is trained against the loss. A run is held so, an evaluation samples as it likes.

        Raises:
            ValueError: it cuts tokens away, and nobody has accepted the bias.
        """
        if self.rollout.accept_truncation_bias:
            return
        given = {"rollout.sampling": self.rollout.sampling} if not self.tasks else {}
        for index, task in enumerate(self.tasks):
            sampling = self.rollout_of(task.name).sampling
            is_own = sampling.truncation != self.rollout.sampling.truncation
            given[f"tasks.{index}.sampling" if is_own else "rollout.sampling"] = sampling
        given |= {f"policies.{name}.sampling": one.sampling for name, one in self.policies.items() if not one.is_frozen}
        for name, sampling in given.items():
            if sampling.truncation:
                raise ValueError(f"{name}: got {sampling.truncation}; {TRUNCATION_REMEDY}")

    @property
    def held_out(self) -> list[HeldOut]:
        """Derived: the tasks that are evaluated, each with its rows and how many of them are taken."""
        named = [
            (task, task.eval.dataset or (self.eval.dataset if task is self.tasks[0] else None)) for task in self.tasks
        ]
        return [
            (task, task.with_options(dataset, self.env), task.eval.limit or self.eval.limit)
            for task, dataset in named
            if dataset is not None
        ]

    def env_of(self, task: TaskSettings) -> dict[str, Any]:
        """Return the options of a task's environment: its own over the run's; none where it has no environment."""
        return task.options_over(self.env)

    def dataset_of(self, task: TaskSettings) -> DatasetSettings:
        """Return where a task's rows come from, with all options where that is an environment."""
        return task.with_options(task.dataset, self.env)

    @property
    def max_group_size(self) -> int:
        """Derived: the most siblings that any task's prompts have."""
        return max([self.rollout_of(task.name).group_size for task in self.tasks], default=self.rollout.group_size)

    @property
    def max_message_bytes(self) -> int:
        """Derived: the largest message that a producer of any task may be waiting to store."""
        own = [self.rollout_of(task.name).max_message_bytes for task in self.tasks]
        return max(own, default=self.rollout.max_message_bytes)

    @property
    def frozen_policies(self) -> dict[str, PolicySettings]:
        """Derived: those of ``policies`` with a model of their own."""
        return {name: policy for name, policy in self.policies.items() if policy.is_frozen}

    @property
    def num_inference_gpus(self) -> int:
        """Derived: GPUs of the servers of one node, those of frozen policies too, where there are any."""
        frozen = self.frozen_policies.values()
        return self.inference.num_gpus + sum(one.num_servers * one.tensor_parallel for one in frozen)

    @property
    def names(self) -> Names:
        """Subjects, streams and keys of this run."""
        return Names(self.run.name)

    @property
    def run_directory(self) -> Path:
        """``<run.directory>/<run.name>``."""
        return self.run.directory / self.run.name

    @property
    def uses_decoupled_loss(self) -> bool:
        """Derived from ``algorithm.decoupled`` and ``max_staleness``."""
        if self.algorithm.decoupled is None:
            return self.rollout.max_staleness > 0
        return self.algorithm.decoupled

    # JetStream numbers, derived
    @property
    def ticket_ack_wait_s(self) -> float:
        return TICKET_ACK_WAIT_S

    @property
    def ticket_heartbeat_s(self) -> float:
        """Two heartbeats may be lost before a lease is."""
        return TICKET_ACK_WAIT_S / 3

    @property
    def duplicate_window_s(self) -> float:
        """Longer than any publish is repeated for. The broker holds the ids of all messages of that time in memory."""
        return max(MIN_DUPLICATE_WINDOW_S, 2 * self.bus.operation_deadline_s)
