"""The losses once more, in plain floats: loops over sequences that were never packed, one token at a time.

Nothing here imports what it checks. ``live`` is the policy that gradients flow through; ``frozen`` is the same policy
where a formula stops the gradient, so that differences in ``live`` alone are the gradient that is meant.
"""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from areal_async.algorithms.objective import ScoredTokens


class Token(NamedTuple):
    """What a loss knows of one token."""

    logprob: float
    start: float
    behave: float
    reference: float
    advantage: float
    entropy: float
    is_trained: bool
    age: int
    is_kept: bool
    weight: float


Sequences = list[list[Token]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Choices:
    """A loss by the names of its parts."""

    surrogate: str = "ppo_clip"
    ratio: str = "token"
    eps_low: float = 0.2
    eps_high: float = 0.2
    dual_clip: float | None = None
    tau_pos: float = 1.0
    tau_neg: float = 1.05
    divergence: float = 0.1
    decoupled: bool = True
    is_loglinear: bool = False
    correction: str = "uncorrected"
    low: float = 0.5
    high: float = 2.0
    masks_moment: bool = False
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0


def random_sequences(seed: int, *, num: int = 4, longest: int = 6, is_on_policy: bool = False) -> Sequences:
    """Make sequences of 1 to ``longest`` tokens, each with at least one that is trained."""
    random = np.random.default_rng(seed)
    sequences = []
    for _ in range(num):
        length = int(random.integers(1, longest + 1))
        trained = random.random(length) < 0.7
        trained[random.integers(length)] = True
        tokens = []
        for place in range(length):
            logprob = -float(random.exponential(1.5)) - 0.02
            start = logprob if is_on_policy else min(logprob + float(random.normal(0, 0.3)), -0.01)
            behave = logprob if is_on_policy else min(start + float(random.normal(0, 0.5)), -0.01)
            tokens.append(
                Token(
                    logprob,
                    start,
                    behave,
                    logprob + float(random.normal(0, 0.4)),
                    float(random.normal()),
                    float(random.random()) * 2,
                    bool(trained[place]),
                    int(random.integers(0, 4)),
                    bool(random.random() < 0.8),
                    float(random.random()) + 0.1,
                )  # fmt: skip
            )
        sequences.append(tokens)
    return sequences


def packed(sequences: Sequences, *, dtype: torch.dtype = torch.float64) -> ScoredTokens:
    """Lay the sequences end to end, as the engine does."""
    tokens = [token for sequence in sequences for token in sequence]

    def column(name: str, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.tensor([getattr(token, name) for token in tokens], dtype=kind)

    return ScoredTokens(
        logprobs_T=column("logprob").requires_grad_(),
        entropy_T=column("entropy").requires_grad_(),
        start_T=column("start"),
        behave_T=column("behave"),
        advantages_T=column("advantage"),
        mask_T=column("is_trained", torch.bool),
        current_T=torch.tensor([token.age == 0 for token in tokens]),
        sequence_T=torch.tensor([number for number, sequence in enumerate(sequences) for _ in sequence]),
        weight_T=column("weight"),
        age_T=column("age", torch.int64),
        reference_T=column("reference"),
        keep_T=column("is_kept", torch.bool),
    )


def moved(sequences: Sequences, number: int, place: int, **given: Any) -> Sequences:
    """Return the sequences with one token changed."""
    changed = [list(sequence) for sequence in sequences]
    changed[number][place] = changed[number][place]._replace(**given)
    return changed


def loss_of(live: Sequences, choices: Choices, frozen: Sequences | None = None) -> float:
    """Add up the loss, sequence by sequence."""
    return sum(
        _sequence_loss(
            [token for token in tokens if token.is_trained], [token for token in still if token.is_trained], choices
        )
        for tokens, still in zip(live, frozen or live, strict=True)
    )


def gradient_of(sequences: Sequences, choices: Choices, *, step: float = 1e-6) -> list[float]:
    """Return the derivative by each token's logprob, by central differences."""
    slopes = []
    for number, tokens in enumerate(sequences):
        for place, token in enumerate(tokens):
            up, down = (
                loss_of(moved(sequences, number, place, logprob=token.logprob + sign * step), choices, sequences)
                for sign in (1, -1)
            )
            slopes.append((up - down) / (2 * step))
    return slopes


def _sequence_loss(tokens: list[Token], frozen: list[Token], choices: Choices) -> float:
    proximal = [_proximal(token, choices) for token in frozen]
    anchors = proximal if choices.decoupled else [token.behave for token in frozen]
    log_ratios = [token.logprob - anchor for token, anchor in zip(tokens, anchors, strict=True)]
    if choices.ratio != "token":
        mean = sum(log_ratios) / len(log_ratios)
        if choices.ratio == "sequence":
            log_ratios = [mean] * len(tokens)
        else:
            still = sum(f.logprob - a for f, a in zip(frozen, anchors, strict=True)) / len(tokens)
            log_ratios = [still + t.logprob - f.logprob for t, f in zip(tokens, frozen, strict=True)]
    gaps = [near - token.behave for near, token in zip(proximal, frozen, strict=True)]
    total = 0.0
    for i, token in enumerate(tokens):
        value = _surrogate(token, frozen[i], anchors[i], log_ratios[i], choices)
        if choices.decoupled:
            value *= correction_of(gaps, i, choices)
        if choices.masks_moment and not token.is_kept:
            value = 0.0
        distance = token.logprob - token.reference
        value += choices.kl_coef * {
            "k1": distance, "k2": distance**2 / 2, "k3": math.exp(-distance) - 1 + distance
        }[choices.kl_estimator]  # fmt: skip
        total += token.weight * (value - choices.entropy_coef * token.entropy)
    return total


def _proximal(token: Token, choices: Choices) -> float:
    if not choices.is_loglinear:
        return token.start
    versions = token.age + 1
    return token.behave / versions + token.logprob * (versions - 1) / versions


def _surrogate(token: Token, frozen: Token, anchor: float, log_ratio: float, choices: Choices) -> float:
    ratio, advantage = math.exp(log_ratio), token.advantage
    low, high = 1 - choices.eps_low, 1 + choices.eps_high
    if choices.surrogate == "ppo_clip":
        gain = min(ratio * advantage, min(max(ratio, low), high) * advantage)
        if choices.dual_clip is not None and advantage < 0:
            gain = max(gain, choices.dual_clip * advantage)
        return -gain
    if choices.surrogate == "reinforce":
        return -advantage * token.logprob
    if choices.surrogate == "importance":
        return -advantage * ratio
    if choices.surrogate == "cispo":
        still = math.exp(frozen.logprob - anchor)
        return -min(max(still, low), high) * advantage * token.logprob
    if choices.surrogate == "sapo":
        tau = choices.tau_pos if advantage > 0 else choices.tau_neg
        return -advantage * (4 / tau) / (1 + math.exp(-tau * (ratio - 1)))
    assert choices.surrogate == "dppo_tv"
    shift = math.exp(frozen.logprob) - math.exp(anchor)
    leaves = shift > choices.divergence if advantage > 0 else -shift > choices.divergence
    return 0.0 if leaves else -advantage * ratio


def correction_of(gaps: list[float], place: int, choices: Choices) -> float:
    """Return the weight of one token of a sequence with these log pi_proximal / pi_behave."""
    weight = math.exp(gaps[place])
    if choices.correction == "truncate":
        return min(weight, choices.high)
    if choices.correction == "icepop":
        return weight if choices.low <= weight <= choices.high else 0.0
    if choices.correction == "reject_tokens":
        return 1.0 if choices.low <= weight <= choices.high else 0.0
    if choices.correction == "reject_sequences":
        return 1.0 if choices.low <= math.exp(sum(gaps) / len(gaps)) <= choices.high else 0.0
    if choices.correction == "truncate_sequences":
        return min(math.prod(math.exp(gap) for gap in gaps), choices.high)
    assert choices.correction == "uncorrected"
    return 1.0


def on_policy(sequences: Sequences) -> Sequences:
    """Return the same with every policy equal."""
    return [[token._replace(start=token.logprob, behave=token.logprob) for token in tokens] for tokens in sequences]
