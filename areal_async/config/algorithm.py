"""The ``algorithm`` section: a preset by name, and every choice it makes as a setting of its own.

A preset is a record of choices that differ from the section's defaults; what the user sets beside ``name`` wins over
it. To add an algorithm made of known parts, add a row to ``PRESETS`` and its name to ``AlgorithmSettings.name``. A new
part is one function (``algorithms/surrogates.py``, ``algorithms/corrections.py``) and its name in
``algorithms/presets.py``.
"""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from areal_async.config.section import FunctionPath, Section

ON_BEHAVIOUR = {"decoupled": False, "correction": "none"}
"""The papers that take their ratio against the policy that sampled, whatever its age."""

PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"advantage_std": "none", "aggregation": "constant"},
    "dapo": {"eps_clip_higher": 0.28, "overlong_cache": None, "filter_equal_groups": True},
    "rloo": {
        "advantage_baseline": "leave_one_out",
        "advantage_std": "none",
        "loss": "reinforce",
        "aggregation": "sequence_sum",
    },
    "reinforce_pp": {"advantage_baseline": "none", "advantage_std": "batch"},
    "reinforce_pp_baseline": {"advantage_std": "batch"},
    "lite_ppo": {"advantage_std": "batch_reward"},
    "gspo": {
        "ratio_level": "sequence",
        "eps_clip": 3e-4,
        "eps_clip_higher": 4e-4,
        "aggregation": "sequence_mean",
    },
    "cispo": {"loss": "cispo", "eps_clip": 1.0, "eps_clip_higher": 4.0, **ON_BEHAVIOUR},
    "sapo": {"loss": "sapo", "aggregation": "sequence_mean"},
    "m2po": {"loss": "m2po", **ON_BEHAVIOUR},
    "dppo": {"loss": "dppo_tv", **ON_BEHAVIOUR},
    "tis": {"decoupled": True, "behave_weight_cap": 2.0},
    "icepop": {"decoupled": True, "correction": "icepop", "aggregation": "sequence_mean"},
    "ppo": {"advantage_baseline": "critic", "advantage_std": "batch"},
}


class AlgorithmSettings(Section):
    """The loss. Knobs carry the papers' names."""

    name: Literal[
        "grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "lite_ppo", "gspo", "cispo",
        "sapo", "m2po", "dppo", "tis", "icepop", "ppo",
    ] = "grpo"  # fmt: skip
    """Preset; it decides the defaults of all other settings here, and any of them can be set beside it."""
    advantage_baseline: Literal["group", "leave_one_out", "none", "critic"] = "group"
    """Taken off a reward: the mean of its group, of its siblings (RLOO), nothing, or a critic's values (PPO)."""
    advantage_std: Literal["group", "batch", "batch_reward", "none"] = "group"
    """Divides the rest: deviation of the group's rewards, of the batch's tokens (less their mean), of its rewards."""
    filter_equal_groups: bool = False
    """Dynamic sampling (DAPO): groups whose rewards are all equal are not trained, others take their place."""
    overlong_cache: int | None = Field(default=0, ge=0)
    """L_cache (DAPO): tokens before the longest answer over which reward is lost; ``None`` a fifth of it, 0 for off."""
    overlong_max: int | None = Field(default=None, ge=1)
    """L_max (DAPO): tokens of the longest answer, all turns together; ``None`` takes ``max_new_tokens``."""
    overlong_factor: float = Field(default=1.0, ge=0)
    """Reward that an answer of L_max tokens loses."""
    loss: Literal["ppo_clip", "reinforce", "importance", "cispo", "sapo", "dppo_tv", "m2po"] = "ppo_clip"
    """Loss of a token, given its ratio and advantage."""
    ratio_level: Literal["token", "sequence", "sequence_token"] = "token"
    """Importance ratio of each token, of its sequence (GSPO), or that with the token's own gradient (GSPO-token)."""
    eps_clip: float = Field(default=0.2, gt=0)
    """Clip range of the importance ratio around 1."""
    eps_clip_higher: float | None = Field(default=None, gt=0)
    """Upper clip range (DAPO, arXiv 2503.14476); ``None`` takes ``eps_clip``."""
    dual_clip: float | None = Field(default=None, gt=1)
    """c (arXiv 1912.09729): most that a token of negative advantage may weigh; ``None`` for no bound."""
    tau_pos: float = Field(default=1.0, gt=0)
    """SAPO's temperature for positive advantages."""
    tau_neg: float = Field(default=1.05, gt=0)
    """SAPO's temperature for other advantages."""
    divergence: float = Field(default=0.2, gt=0, le=1)
    """DPPO: change of a token's probability beyond which it gets no more gradient in that direction."""
    m2_threshold: float = Field(default=0.04, gt=0)
    """tau_M2 (M2PO): mean squared log ratio that the tokens of a mini-batch may keep."""
    decoupled: bool | None = None
    """Decoupled objective (AReaL, arXiv 2505.24298 eq. 5); ``None`` switches it on when ``max_staleness`` > 0."""
    proximal: Literal["recompute", "loglinear"] = "recompute"
    """Proximal logprobs of a decoupled loss: by a forward pass, or on a line to the trained policy (A-3PO)."""
    correction: Literal[
        "truncate", "icepop", "reject_token", "reject_sequence", "truncate_sequence", "none"
    ] = "truncate"  # fmt: skip
    """What a decoupled loss does with pi_proximal / pi_behave: truncate it (TIS), leave tokens out, or sequences."""
    behave_weight_cap: float = Field(default=5.0, gt=0)
    """Largest weight pi_proximal / pi_behave of a token; larger ones are cut to it, or left out."""
    behave_weight_floor: float = Field(default=0.5, ge=0)
    """Smallest one that IcePop and rejection let through."""
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum", "constant"] = "token_mean"
    """Mean over tokens, over sequences of their token mean (GRPO's paper), of their sum, or of that by a constant."""
    aggregation_constant: int | None = Field(default=None, ge=1)
    """Constant of that mean, in tokens (Dr.GRPO); ``None`` takes ``max_new_tokens``."""
    kl_coef: float = Field(default=0.0, ge=0)
    """beta: weight of the distance to a reference model; 0 needs none."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimate of that distance at a token."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where it counts."""
    entropy_coef: float = Field(default=0.0, ge=0)
    """Weight of the entropy bonus."""
    credit: Literal["returns", "process", "turns"] = "returns"
    """What a workflow's rewards of single replies are: returns, later rewards included; rewards of steps, normalised
    and then added up from each on (GRPO's process supervision); rewards of turns, whose returns are compared turn by
    turn."""
    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of PPO with a critic, per token; of ``credit=turns`` per turn. A return has been discounted."""
    gae_lambda: float = Field(default=0.95, ge=0, le=1)
    """GAE's lambda."""
    value_clip: float | None = Field(default=0.2, gt=0)
    """How far a critic's value may move in one step before its error stops counting; ``None`` for any."""
    num_minibatches: int = Field(default=1, ge=1)
    """Optimizer updates per training step."""
    calls: tuple[FunctionPath, ...] = ()
    """Calls of your own in a training step: ``FILE.py:name``, a function named like what it makes (``advantages``)."""

    @model_validator(mode="before")
    @classmethod
    def _take_preset(cls, given: Any) -> Any:
        """Put the preset's choices under what is given."""
        if not isinstance(given, Mapping):
            return given
        preset = PRESETS.get(str(given.get("name", "grpo")), {})
        return {**preset, **given}

    @field_validator("advantage_std", mode="before")
    @classmethod
    def _name_std(cls, value: Any) -> Any:
        """Take the yes and no that runs of before have in their files."""
        return {True: "group", False: "none"}[value] if isinstance(value, bool) else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.ratio_level != "token" and self.loss not in ("ppo_clip", "importance"):
            raise ValueError(
                f"ratio_level: got {self.ratio_level} with loss={self.loss}, need token; "
                "ppo_clip and importance alone take a sequence's ratio"
            )
        if self.loss == "m2po" and self.decoupled:
            raise ValueError(
                "decoupled: got true with loss=m2po, need false; its ratio is taken against the behaviour policy"
            )
        if self.advantage_baseline == "critic" and self.advantage_std not in ("batch", "none"):
            raise ValueError(
                f"advantage_std: got {self.advantage_std} with advantage_baseline=critic, need batch or none; "
                "a critic's advantages are those of tokens"
            )
        if self.credit != "returns":
            known = ("group",) if self.credit == "process" else ("group", "none")
            if self.advantage_baseline != "group" or self.advantage_std not in known:
                raise ValueError(
                    f"credit: got {self.credit} with advantage_baseline={self.advantage_baseline}, "
                    f"advantage_std={self.advantage_std}, need group and {' or '.join(known)}; "
                    "replies are compared within their group"
                )
        if self.behave_weight_floor > self.behave_weight_cap:
            raise ValueError(
                f"behave_weight_floor: got {self.behave_weight_floor}, need at most "
                f"behave_weight_cap={self.behave_weight_cap}; else no token would pass"
            )
        return self

    @property
    def one_reward_for(self) -> str:
        """Derived: what makes a step know one reward for a whole trajectory alone; empty where replies have theirs."""
        if "critic" in self.needs_models:
            return f"algorithm.name={self.name}"
        return "algorithm.kl_in=reward" if self.has_kl_reward else ""

    @property
    def needs_models(self) -> tuple[str, ...]:
        """Derived: models beside the policy."""
        return ("critic",) * (self.advantage_baseline == "critic") + ("reference",) * (self.kl_coef > 0)

    @property
    def has_kl_reward(self) -> bool:
        """Derived: the distance to the reference comes off the rewards."""
        return self.kl_coef > 0 and self.kl_in == "reward"

    @property
    def needs_siblings(self) -> str:
        """Derived: the setting by which an answer without another to its prompt teaches nothing; empty for none."""
        if self.calls:
            return ""  # they make the advantages
        if self.filter_equal_groups:
            return "filter_equal_groups=true"
        # Process supervision compares the steps of one answer too.
        is_compared = self.advantage_baseline in ("group", "leave_one_out") and self.credit != "process"
        return f"advantage_baseline={self.advantage_baseline}" if is_compared else ""

    def check_run(self, *, max_new_tokens: int) -> None:
        """Hold the choices against the rest of a run's settings.

        Raises:
            ValueError: they do not fit.
        """
        longest = self.overlong_max or max_new_tokens
        if self.overlong_cache is not None and self.overlong_cache > longest:
            raise ValueError(
                f"algorithm.overlong_cache: got {self.overlong_cache}, need at most {longest} tokens, "
                "the longest answer; lower it, or set overlong_max"
            )
