"""Which settings a run keeps for good, each with why, and which of them another start of it may say otherwise. Pure.

Every setting is one or the other, and a test holds that: whoever adds one decides. A star stands for every item of a
list, and for every name that is the user's own.
"""

from collections.abc import Iterator

KEPT = {
    "its subjects, streams and keys are called by it": ("run.name",),
    "it says which data the run is made of": (
        "tasks.*.workflow",
        "tasks.*.dataset",
        "tasks.*.group_size",
        "rollout.group_size",
        "rollout.curriculum",
        "run.seed",
    ),
    "prompts so far were written by it": ("rollout.template", "policies.*.template"),
    "the weights so far were trained from it": (
        "model.path",
        "model.critic.path",
        "trainer.lora.rank",
        "trainer.lora.alpha",
        "trainer.lora.target_modules",
    ),
    "the distance to it was part of what was trained": ("model.reference.path",),
    "tokens so far were sampled and trained in it": ("model.dtype",),
    "answers and rewards so far are of that model": ("policies.*.kind", "policies.*.path"),
    "prompts were recorded dead by it": ("rollout.max_attempts",),
    "rewards became advantages by it, and the archive is held against that": (
        "algorithm.name",
        "algorithm.advantage_baseline",
        "algorithm.advantage_std",
        "algorithm.overlong_cache",
        "algorithm.overlong_max",
        "algorithm.overlong_factor",
        "algorithm.kl_in",
        "algorithm.credit",
        "algorithm.gamma",
        "algorithm.calls",
    ),
}
"""Why -> settings that are never otherwise; a section stands for all that is in it."""

SAMPLING = """temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty max_new_tokens stop
    ignore_eos"""
MAY_CHANGE = {
    "run": "steps watchdog_s on_stall directory max_failed_groups",
    "tasks.*": "ratio min_group_size episode_deadline_s",
    "tasks.*.sampling": SAMPLING,
    "tasks.*.eval": "dataset.path dataset.python dataset.seeds dataset.name dataset.split limit",
    "eval": "every_steps dataset.path dataset.python dataset.seeds dataset.name dataset.split limit samples",
    "rollout": """min_group_size batch_groups max_staleness when_stale episode_deadline_s setup_deadline_s
        loop_deadline_s max_trajectories_per_node max_trajectory_bytes linger_ms max_stream_bytes""",
    "rollout.sampling": SAMPLING,
    "policies.*": "num_servers tensor_parallel context_length dtype",
    "policies.*.sampling": SAMPLING,
    "inference": """backend python num_servers tensor_parallel interrupt weight_transfer transfer_deadline_s
        bucket_bytes num_threads context_length max_running_requests stream_interval flags tool_call_parser
        first_token_deadline_s between_tokens_deadline_s total_deadline_s start_deadline_s""",
    "algorithm": """filter_equal_groups loss ratio_level eps_clip eps_clip_higher dual_clip tau_pos tau_neg divergence
        m2_threshold decoupled proximal correction behave_weight_cap behave_weight_floor aggregation
        aggregation_constant kl_coef kl_estimator entropy_coef gae_lambda value_clip num_minibatches""",
    "trainer": """num_ranks engine pipeline_parallel pipeline_schedule pipeline_stages_per_rank tensor_parallel replicas
        lr warmup_steps schedule weight_decay betas eps max_grad_norm token_budget checkpoint_every_steps
        keep_checkpoints keep_every_steps keep_best async_checkpoints num_threads activation_checkpointing cpu_offload
        reduce_dtype max_restarts lora.transfer""",
    "trainer.critic": "pipeline_parallel tensor_parallel replicas lr warmup_steps max_grad_norm",
    "trainer.reference": "pipeline_parallel tensor_parallel replicas",
    "metrics": """tensorboard wandb_project prometheus prometheus_host traces traces_ratio traces_texts
        traces_key""",
    "health": "equal_rewards_steps logprob_gap untrained_batches",
    "endpoint": "host on_unsupported",
    "launch": "backend join_wait_s",
    "bus": """url credentials ca monitor_url host http_port port max_disk_bytes operation_deadline_s""",
}
"""Section -> those of its settings that a start may say otherwise. Some have bounds (``resumed``)."""


def why_kept(name: str) -> str:
    """Return why a run keeps a setting, or something in a section; empty where another start may say it otherwise."""
    for why, settings in KEPT.items():
        if any(matches(name, one) or matches(one, name) for one in settings):
            return why
    return ""


def may_change() -> Iterator[str]:
    """Yield every setting that a start may say otherwise, by its full name."""
    for section, names in MAY_CHANGE.items():
        yield from (f"{section}.{name}" for name in names.split())


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern is of a setting, or of a section that it is in."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) >= len(wanted) and all("*" in (a, b) or a == b for a, b in zip(parts, wanted, strict=False))
