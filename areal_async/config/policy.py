"""The model under training, how a policy speaks, and the models beside: those that workflows take, and arms."""

import json
import re
from collections.abc import Collection, Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_serializer, field_validator, model_validator

from areal_async.config.section import HubPath, Section
from areal_async.config.template import TemplateSettings
from areal_async.protocol.arms import ARM_NAME, MAX_ARMS, PARTS
from areal_async.protocol.fields import MAX_REWARD, MAX_SERVER_RANKS, MAX_TEMPERATURE, MAX_TOP_K

POLICY_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,47}")
"""A Python parameter, and part of a server's id."""
TAKEN_NAMES = ("prompt", "policy")
MAX_PENALTY = 2.0
"""The bound that the servers have for a penalty, either way."""
MAX_BIAS = 1e9
"""The most that is added to a logit: enough to force or to forbid a token, and no infinity in 32 bits."""
GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
"""What can be said of the form of an answer, one for a call."""
TokenId = Annotated[int, Field(ge=0)]
ONLY_FROZEN = ("num_servers", "tensor_parallel", "context_length", "template", "dtype")


def check_top_k(top_k: int | None) -> int | None:
    """Return a number of tokens to keep that the servers take, or -1 for all, or None.

    Raises:
        ValueError: it is 0.
    """
    if top_k == 0:
        raise ValueError("got 0, need -1 or at least 1")
    return top_k


TRUNCATION_REMEDY = (
    "its tokens cannot be trained without a bias, as no logprob knows what was cut away; leave it out, or accept that "
    "with rollout.accept_truncation_bias=true"
)
"""Ends the sentence that refuses it."""


class SamplingSettings(Section):
    """How the servers sample."""

    temperature: float = Field(default=1.0, ge=0, le=MAX_TEMPERATURE)
    """Divides the logits; 0 is greedy. Every token is trained at the one that it was sampled at, 0 as 1."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Smallest set of tokens with this probability; 1 keeps all."""
    top_k: int = Field(default=-1, ge=-1, le=MAX_TOP_K)
    """Only the k likeliest tokens; -1 keeps all."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Only tokens at least this share as likely as the likeliest; 0 keeps all."""
    frequency_penalty: float = Field(default=0.0, ge=-MAX_PENALTY, le=MAX_PENALTY)
    """Taken off the logit of a token for each time that the answer has it; 0 for none."""
    presence_penalty: float = Field(default=0.0, ge=-MAX_PENALTY, le=MAX_PENALTY)
    """Taken off the logit of a token that the answer has; 0 for none."""
    repetition_penalty: float = Field(default=1.0, gt=0, le=MAX_PENALTY)
    """Divides the logit of a token that the answer has, or multiplies it where it is negative; 1 for none."""
    max_new_tokens: int = Field(default=1024, ge=1)
    """Longest completion of one turn, in tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end a turn, besides the end-of-turn token."""
    ignore_eos: bool = False
    """Go on past the end-of-turn token, up to ``max_new_tokens``: for measuring."""

    _check_top_k = field_validator("top_k")(check_top_k)

    @property
    def truncation(self) -> str:
        """Derived: what keeps tokens from being drawn that the model finds possible, as ``name=value``; empty for none.

        No logprob has a trace of it: a server reports those of the whole distribution.
        """
        if not self.temperature:
            return "temperature=0"
        given = {"top_p": self.top_p < 1, "top_k": self.top_k > 0, "min_p": self.min_p > 0}
        return next((f"{name}={getattr(self, name):g}" for name, is_on in given.items() if is_on), "")

    @property
    def greedy(self) -> Self:
        """Derived: the likeliest token each time, as long an answer."""
        return self.model_copy(update={"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0})


class CallSampling(SamplingSettings):
    """How one call is sampled: what is said for all of them, and what makes sense for a single one only."""

    min_new_tokens: int = Field(default=0, ge=0)
    """No end of turn before so many tokens."""
    stop_token_ids: tuple[TokenId, ...] = ()
    """Tokens that end the turn, besides those of the model."""
    logit_bias: dict[TokenId, Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS)]] = {}
    """Token id -> what is added to its logit."""
    seed: int | None = None
    """Seed of the draws: the same prompt with the same seed is answered alike, by siblings too; ``None`` for a new one
    each time. Of several replies to one call, each has the next."""
    json_schema: dict[str, Any] | str | None = None
    """The answer is JSON of this schema."""
    regex: str | None = None
    """The answer matches this, whole."""
    ebnf: str | None = None
    """The answer is of this grammar, in GBNF, whose start is ``root``."""
    structural_tag: dict[str, Any] | str | None = None
    """Text whose tagged parts are of a grammar each, as XGrammar has them."""
    top_logprobs: int = Field(default=0, ge=0, le=20)
    """So many of the likeliest tokens at each position are told in ``Reply.top_logprobs``."""

    @property
    def grammar(self) -> dict[str, str]:
        """Derived: the grammar of the answer as the servers take it, under its name; empty where it is free."""
        given = {name: getattr(self, name) for name in GRAMMARS}
        return {
            name: value if isinstance(value, str) else json.dumps(value)
            for name, value in given.items()
            if value not in (None, "")
        }

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        if len(self.grammar) > 1:
            raise ValueError(f"got {' and '.join(self.grammar)}, need at most one grammar")
        if self.ignore_eos and self.stop_token_ids:
            raise ValueError("got stop_token_ids with ignore_eos, which goes on past every such token; leave one out")
        if self.grammar and (self.ignore_eos or self.min_new_tokens):
            other = "ignore_eos" if self.ignore_eos else "min_new_tokens"
            raise ValueError(f"got {other} with a grammar, which says itself where the answer ends; leave one out")
        if self.min_new_tokens > self.max_new_tokens:
            raise ValueError(
                f"got min_new_tokens={self.min_new_tokens}, need at most max_new_tokens={self.max_new_tokens}"
            )
        return self


class OtherModelSettings(Section):
    """A model beside the one that is served; there is one where ``algorithm`` asks for it."""

    path: HubPath | None = None
    """Hugging Face folder or hub name; ``None`` takes ``model.path``, as it is before training."""


class ModelSettings(Section):
    """The model that is trained and served, and those beside it."""

    path: HubPath = "Qwen/Qwen2.5-1.5B-Instruct"
    """Hugging Face folder or hub name."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Data type of the forward and backward pass and of the served weights; parameters, gradients and optimizer are
    float32."""
    critic: OtherModelSettings = OtherModelSettings()
    """Critic of PPO: the decoder with a head of one output, new or, of a reward model's folder, that one's."""
    reference: OtherModelSettings = OtherModelSettings()
    """Reference of the KL penalty (``algorithm.kl_coef``); never trained."""

    def for_role(self, role: Literal["critic", "reference"]) -> "ModelSettings":
        """Return the settings of the model of a role, as if it were the only one."""
        other: OtherModelSettings = getattr(self, role)
        return ModelSettings(path=other.path or self.path, dtype=self.dtype)


class PolicySettings(Section):
    """A model that a workflow takes beside ``policy``: another role of the same one, or a frozen one."""

    kind: Literal["policy", "reward"] = "policy"
    """``policy`` speaks; ``reward`` scores: a frozen sequence classifier of one label, as ``reward-model`` trains it,
    which the workflow asks with ``await NAME.score(messages)``."""
    path: HubPath | None = None
    """Hugging Face folder or hub name of a model that stays as it is, with servers of its own on every node; ``None``
    for the weights under training in another role, whose turns are trained too."""
    sampling: SamplingSettings = SamplingSettings()
    """What is given here goes before ``rollout.sampling``. Evaluation has roles answer greedily all the same."""
    num_servers: int = Field(default=1, ge=1)
    """Servers per node; of a frozen model only, as all below."""
    tensor_parallel: int = Field(default=1, ge=1, le=MAX_SERVER_RANKS)
    """GPUs per server."""
    context_length: int | None = None
    """Longest prompt and answer together, in tokens; ``None`` takes the model's."""
    template: TemplateSettings = TemplateSettings()
    """Chat template of the policy, where it is to be another than its tokenizer's."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Data type of the served weights; ``None`` takes ``model.dtype``."""

    @property
    def is_frozen(self) -> bool:
        """It has a model of its own, which is never trained."""
        return self.path is not None

    @property
    def is_reward(self) -> bool:
        """It scores what others say."""
        return self.kind == "reward"

    def sampling_over(self, base: SamplingSettings) -> SamplingSettings:
        """Return ``base`` with what is given here."""
        given = {name: getattr(self.sampling, name) for name in self.sampling.model_fields_set}
        return base.model_copy(update=given)

    @field_serializer("sampling")
    def _only_given(self, sampling: SamplingSettings) -> dict[str, Any]:
        """Write no default: read again, it would count as given."""
        return sampling.model_dump(mode="json", exclude_unset=True)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.is_reward and not self.is_frozen:
            raise ValueError("got kind=reward without path, need the path of a reward model, which stays as it is")
        if self.is_reward and self.sampling.model_fields_set:
            raise ValueError("got sampling with kind=reward, need none; a reward model does not sample")
        idle = [name for name in ONLY_FROZEN if getattr(self, name) != type(self).model_fields[name].default]
        if not self.is_frozen and idle:
            raise ValueError(
                f"got {idle[0]} without path, need the path of a frozen model; a role of the model under training is "
                "served by inference's servers"
            )
        return self


def check_names(names: Iterable[str]) -> None:
    """Refuse a name that no parameter of a workflow could have.

    Raises:
        ValueError: there is one.
    """
    bad = [name for name in names if not POLICY_NAME.fullmatch(name) or name in TAKEN_NAMES]
    if bad:
        raise ValueError(
            f"policies: got the name {bad[0]!r}, need up to 48 letters, digits and _, as a Python parameter is called, "
            f"and none of {', '.join(TAKEN_NAMES)}"
        )


class ArmSettings(Section):
    """A model that answers additional prompts beside the run; versions of the run itself come by ``arm add``."""

    path: HubPath
    """Hugging Face folder or hub name."""
    share: float = Field(default=0.1, ge=1 / PARTS, le=1)
    """Additional prompts for each one that is admitted, answered once by the arm and once by the newest weights; they
    take no credit and are never trained."""
    alpha: float = Field(default=0.05, gt=0, lt=1)
    """Chance that an arm is ever told apart from weights that are as good, however often one looks."""
    reach: float = Field(default=1.0, gt=0, le=2 * MAX_REWARD)
    """Largest size of a difference of two rewards: 1 for rewards from 0 to 1. A pair beyond is counted as failed."""


def check_arms(arms: Collection[str]) -> None:
    """Refuse a name that no server's id could have, and too many.

    Raises:
        ValueError: there is one.
    """
    bad = [name for name in arms if not re.fullmatch(ARM_NAME, name)]
    if bad:
        raise ValueError(f"arms: got the name {bad[0]!r}, need up to 48 letters, digits and _, no digit first")
    if len(arms) > MAX_ARMS:
        raise ValueError(f"arms: got {len(arms)}, need at most {MAX_ARMS}")


def refuse_own_servers(frozen: Collection[str], arms: Collection[str], *, colocate: str) -> None:
    """Refuse models with servers of their own where servers share their GPUs with the trainer.

    Raises:
        ValueError: there is one.
    """
    if frozen:
        raise ValueError(
            f"policies.{min(frozen)}.path: got a model of its own with inference.colocate={colocate}, need policies of "
            "the trained model alone: its servers would take memory that the trainer counts on; leave colocate out, "
            "or the policy"
        )
    if arms:
        raise ValueError(
            f"arms.{min(arms)}: got an arm with inference.colocate={colocate}, need none: its servers would take "
            "memory that the trainer counts on; leave colocate out, or the arm"
        )
