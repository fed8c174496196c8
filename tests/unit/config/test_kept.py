"""Each setting is one that a run keeps, with the reason, or one that a start of it may say otherwise."""

from areal_async.config.kept import KEPT, matches, why_kept
from areal_async.config.settings import Settings
from areal_async.config.tree import ANY_INDEX, ANY_NAME, annotation_at, leaves

PLACES = {".".join("*" if part in (ANY_INDEX, ANY_NAME) else part for part in parts) for parts, _ in leaves(Settings)}
"""Every setting there is."""
SAMPLING = """temperature top_p top_k min_p frequency_penalty presence_penalty repetition_penalty max_new_tokens stop
    ignore_eos"""
MAY_CHANGE = {
    "run": "steps watchdog_s on_stall directory max_failed_groups",
    "tasks.*": "ratio min_group_size episode_deadline_s",
    "tasks.*.sampling": SAMPLING,
    "tasks.*.eval": """dataset.path dataset.python dataset.seeds dataset.environment dataset.env dataset.name
        dataset.split limit""",
    "eval": """every_steps dataset.path dataset.python dataset.seeds dataset.environment dataset.env dataset.name
        dataset.split limit samples share""",
    "rollout": """min_group_size accept_truncation_bias batch_groups max_staleness admission when_stale
        episode_deadline_s
        setup_deadline_s loop_deadline_s max_trajectories_per_node max_boxes max_trajectory_bytes linger_ms
        max_stream_bytes max_image_stream_bytes
       """,
    "rollout.sampling": SAMPLING,
    "policies.*": "num_servers tensor_parallel context_length dtype",
    "policies.*.sampling": SAMPLING,
    "arms.*": "path share alpha reach",
    "inference": """backend python num_servers tensor_parallel colocate interrupt weight_transfer disk_every
        transfer_deadline_s bucket_bytes num_threads context_length max_running_requests stream_interval flags
        tool_call_parser first_token_deadline_s between_tokens_deadline_s total_deadline_s start_deadline_s""",
    "algorithm": """filter_equal_groups loss ratio_level eps_clip eps_clip_higher dual_clip tau_pos tau_neg divergence
        m2_threshold decoupled proximal correction behave_weight_cap behave_weight_floor aggregation
        aggregation_constant kl_coef kl_estimator entropy_coef gae_lambda value_clip num_minibatches""",
    "trainer": """num_ranks num_hosts engine pipeline_parallel pipeline_schedule pipeline_stages_per_rank
        tensor_parallel replicas lr warmup_steps schedule weight_decay betas eps max_grad_norm token_budget
        checkpoint_every_steps keep_checkpoints keep_every_steps keep_best async_checkpoints num_threads
        activation_checkpointing compile cpu_offload reduce_dtype max_restarts
        elastic lora.transfer""",
    "trainer.critic": "pipeline_parallel tensor_parallel replicas lr warmup_steps max_grad_norm",
    "trainer.reference": "pipeline_parallel tensor_parallel replicas",
    "metrics": """tensorboard wandb_project prometheus prometheus_host traces traces_ratio traces_texts
        traces_key""",
    "gate": "action against metric at_least alpha",
    "health": "equal_rewards_steps logprob_gap rollback untrained_batches",
    "endpoint": "host on_unsupported",
    "serve": """host port directory keys max_requests request_deadline_s shutdown_deadline_s follow_s replace record
        record_file_bytes record_max_bytes""",
    "launch": "backend hosts remote_command join_wait_s weights_cache num_hosts cpus_per_host gpus_per_host",
    "bus": """url replicas credentials ca monitor_url host http_port port max_disk_bytes operation_deadline_s""",
}
"""Section -> those of its settings that a start may say otherwise. Some have bounds (``resumed``)."""


def test_each_setting_is_kept_or_may_change() -> None:
    """Anyone who adds one decides: into ``KEPT`` with its reason, or into ``MAY_CHANGE``."""
    free = [f"{section}.{name}" for section, names in MAY_CHANGE.items() for name in names.split()]
    kept = {place for place in PLACES for names in KEPT.values() if any(matches(place, one) for one in names)}

    assert len(free) == len(set(free))
    assert PLACES - kept - set(free) == set(), "neither kept nor free to change"
    assert kept & set(free) == set(), "both"
    assert set(free) - PLACES == set(), "no such setting"


def test_what_is_kept_exists() -> None:
    for name in [name for names in KEPT.values() for name in names]:
        parts = [ANY_INDEX if part == "*" else part for part in name.split(".")]

        assert annotation_at(Settings, parts) is not None, name


def test_a_section_is_kept_with_what_is_in_it() -> None:
    assert why_kept("tasks.3.dataset.split") == why_kept("tasks.3.dataset") == why_kept("tasks") != ""
    assert why_kept("policies.judge") != ""
    assert why_kept("eval.dataset") == why_kept("tasks.0.eval.dataset") == why_kept("tasks.0.ratio") == ""
