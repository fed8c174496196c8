"""Which settings a run keeps for good, each with why; another start of it may say any other one otherwise. Pure.

A test lists the others, so that anyone who adds a setting decides which it is. A star stands for every item of a list,
and for every name that is the user's own.
"""

KEPT = {
    "its subjects, streams and keys are called by it": ("run.name",),
    "it says which data the run is made of": (
        "tasks.*.workflow",
        "tasks.*.dataset",
        "tasks.*.env",
        "env",
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
        "trainer.vision",
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


def why_kept(name: str) -> str:
    """Return why a run keeps a setting, or something in a section; empty where another start may say it otherwise."""
    for why, settings in KEPT.items():
        if any(matches(name, one) or matches(one, name) for one in settings):
            return why
    return ""


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern is of a setting, or of a section that it is in."""
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) >= len(wanted) and all("*" in (a, b) or a == b for a, b in zip(parts, wanted, strict=False))
