"""Every policy loss is the sum that plain loops over unpacked sequences give, in value and in gradient."""

import functools
import itertools
import math
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from areal_async.algorithms import corrections, surrogates
from areal_async.algorithms.likelihood import likelihood_loss
from areal_async.algorithms.objective import LossTerms, ScoredTokens
from areal_async.algorithms.policy import PolicyLoss
from areal_async.algorithms.presets import policy_objective
from areal_async.algorithms.ratios import RATIOS
from areal_async.config.algorithm import PRESETS
from areal_async.config.settings import Settings
from areal_async.protocol.fields import MAX_LOGPROB, MAX_REWARD
from tests.unit.algorithms.plain import Choices, gradient_of, loss_of, on_policy, packed, random_sequences

SURROGATES = {
    "ppo_clip": ("eps_clip", "eps_clip_higher", "dual_clip"),
    "reinforce": (),
    "importance": (),
    "cispo": ("eps_clip", "eps_clip_higher"),
    "sapo": ("tau_pos", "tau_neg"),
    "dppo_tv": ("divergence",),
}
CORRECTIONS: dict[str, tuple[str, ...]] = {
    "uncorrected": (),
    "truncate": ("cap",),
    "icepop": ("low", "high"),
    "reject_tokens": ("low", "high"),
    "reject_sequences": ("low", "high"),
    "truncate_sequences": ("cap",),
}
KINDS = [
    *(Choices(surrogate=name) for name in SURROGATES),
    *(Choices(surrogate=name, decoupled=False) for name in SURROGATES),
    *(Choices(correction=name) for name in CORRECTIONS),
    *(Choices(surrogate="reinforce", correction=name, low=0.7, high=1.2) for name in CORRECTIONS),
    Choices(eps_low=0.1, eps_high=0.28, dual_clip=1.5, entropy_coef=0.01),
    Choices(dual_clip=1.2, decoupled=False),
    Choices(ratio="sequence", eps_low=0.1, eps_high=0.15),
    Choices(ratio="sequence_token", eps_low=0.1, eps_high=0.15, correction="truncate"),
    Choices(ratio="sequence", surrogate="importance", decoupled=False),
    Choices(is_loglinear=True, correction="truncate"),
    Choices(is_loglinear=True, surrogate="cispo", correction="icepop"),
    *(Choices(kl_coef=0.1, kl_estimator=name, surrogate="importance") for name in ("k1", "k2", "k3")),
    Choices(surrogate="importance", decoupled=False, masks_moment=True),
    Choices(masks_moment=True, entropy_coef=0.3, kl_coef=0.2, correction="truncate"),
]
seeds = st.integers(0, 2**32)


def name_of(choices: Choices) -> str:
    """Say what differs from the defaults."""
    plain = asdict(Choices())
    return "-".join(str(value) for key, value in asdict(choices).items() if value != plain[key]) or "defaults"


def loss_for(choices: Choices) -> PolicyLoss:
    knobs: dict[str, Any] = {
        "eps_clip": choices.eps_low, "eps_clip_higher": choices.eps_high, "dual_clip": choices.dual_clip,
        "tau_pos": choices.tau_pos, "tau_neg": choices.tau_neg, "divergence": choices.divergence,
        "cap": choices.high, "low": choices.low, "high": choices.high,
    }  # fmt: skip

    def made(module: Any, table: dict[str, tuple[str, ...]], name: str) -> Any:
        return functools.partial(getattr(module, name), **{knob: knobs[knob] for knob in table[name]})

    return PolicyLoss(
        surrogate=made(surrogates, SURROGATES, choices.surrogate),
        log_ratio=RATIOS[choices.ratio],
        decoupled=choices.decoupled,
        correction=made(corrections, CORRECTIONS, choices.correction),
        is_loglinear=choices.is_loglinear,
        kl_coef=choices.kl_coef,
        kl_estimator=choices.kl_estimator,
        entropy_coef=choices.entropy_coef,
        m2_threshold=0.04 if choices.masks_moment else None,
    )


def gradients(loss: PolicyLoss, tokens: ScoredTokens) -> tuple[Tensor, Tensor]:
    by_logprob, by_entropy = torch.autograd.grad(
        loss(tokens).loss, (tokens.logprobs_T, tokens.entropy_T), allow_unused=True, materialize_grads=True
    )
    return by_logprob, by_entropy


@settings(max_examples=8, deadline=None)
@given(seeds, st.integers(1, 4))
def test_every_loss_equals_plain_loops_over_unpacked_sequences(seed: int, num: int) -> None:
    sequences = random_sequences(seed, num=num)
    tokens = packed(sequences)

    for choices in KINDS:
        loss = loss_for(choices)(tokens).loss.item()
        assert loss == pytest.approx(loss_of(sequences, choices), rel=1e-6, abs=1e-9), name_of(choices)


@settings(max_examples=2, deadline=None)
@given(seeds)
def test_every_gradient_equals_differences_of_plain_loops(seed: int) -> None:
    sequences = random_sequences(seed, num=3)
    tokens = packed(sequences)
    assert tokens.weight_T is not None

    for choices in KINDS:
        by_logprob, by_entropy = gradients(loss_for(choices), tokens)
        expected = -choices.entropy_coef * tokens.weight_T * tokens.mask_T
        assert by_logprob.tolist() == pytest.approx(gradient_of(sequences, choices), rel=1e-5, abs=1e-7), name_of(
            choices
        )
        assert by_entropy.tolist() == pytest.approx(expected.tolist()), name_of(choices)


@pytest.mark.parametrize(
    "choices",
    [one for one in KINDS if one.surrogate != "cispo" and one.ratio != "sequence_token" and not one.is_loglinear],
    ids=name_of,
)
def test_a_gradient_passes_gradcheck(choices: Choices) -> None:
    tokens = packed(random_sequences(7, num=3, longest=3))
    loss = loss_for(choices)

    def of(logprobs_T: Tensor, entropy_T: Tensor) -> Tensor:
        return loss(replace(tokens, logprobs_T=logprobs_T, entropy_T=entropy_T)).loss

    assert torch.autograd.gradcheck(of, (tokens.logprobs_T, tokens.entropy_T))


@pytest.mark.parametrize("name", SURROGATES)
def test_a_surrogate_passes_gradcheck_by_logprob_and_by_ratio(name: str) -> None:
    tokens = packed(random_sequences(3))
    surrogate = loss_for(Choices(surrogate=name, dual_clip=1.5)).surrogate
    ratios = (tokens.logprobs_T - tokens.start_T).detach()

    assert torch.autograd.gradcheck(
        lambda logprobs_T: surrogate(logprobs_T, ratios, tokens.advantages_T)[0], (tokens.logprobs_T,)
    )
    if name != "cispo":
        assert torch.autograd.gradcheck(
            lambda ratios_T: surrogate(tokens.logprobs_T.detach(), ratios_T, tokens.advantages_T)[0],
            (ratios.requires_grad_(),),
        )


@settings(max_examples=5, deadline=None)
@given(seeds)
def test_with_every_policy_equal_all_token_losses_have_the_gradient_of_reinforce(seed: int) -> None:
    tokens = packed(on_policy(random_sequences(seed)))
    plain, _ = gradients(loss_for(Choices(surrogate="reinforce")), tokens)

    for surrogate, decoupled in itertools.product(SURROGATES, (True, False)):
        correction = "truncate" if decoupled else "uncorrected"
        choices = Choices(surrogate=surrogate, decoupled=decoupled, correction=correction, dual_clip=3.0)
        gradient, _ = gradients(loss_for(choices), tokens)
        assert torch.allclose(gradient, plain, rtol=1e-12, atol=0), surrogate


@settings(max_examples=5, deadline=None)
@given(seeds)
def test_with_every_policy_equal_the_presets_have_the_gradient_of_reinforce(seed: int) -> None:
    drawn = packed(on_policy(random_sequences(seed)))
    tokens = replace(drawn, keep_T=torch.ones_like(drawn.mask_T))  # M2PO keeps what has not moved
    plain, _ = gradients(loss_for(Choices(surrogate="reinforce")), tokens)

    for name, max_staleness in itertools.product(PRESETS, (0, 2)):
        run = Settings.model_validate({"algorithm": {"name": name}, "rollout": {"max_staleness": max_staleness}})
        if run.algorithm.ratio_level == "token":  # a sequence's spreads the advantages of its tokens
            gradient, _ = gradients(policy_objective(run), tokens)
            assert torch.allclose(gradient, plain, rtol=1e-12, atol=0), name


@settings(max_examples=5, deadline=None)
@given(seeds)
def test_with_one_advantage_per_sequence_gspo_token_has_gspos_gradient_and_on_policy_grpos(seed: int) -> None:
    drawn = random_sequences(seed)
    counts = [sum(token.is_trained for token in tokens) for tokens in drawn]
    even = [
        [token._replace(advantage=tokens[0].advantage, weight=1 / count) for token in tokens]
        for tokens, count in zip(drawn, counts, strict=True)
    ]

    for sequences in (even, on_policy(even)):
        by_sequence, _ = gradients(loss_for(Choices(ratio="sequence")), packed(sequences))
        by_token, _ = gradients(loss_for(Choices(ratio="sequence_token")), packed(sequences))
        assert torch.allclose(by_sequence, by_token, rtol=1e-9, atol=1e-12)
    grpo, _ = gradients(loss_for(Choices()), packed(sequences))
    assert torch.allclose(by_token, grpo, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_packed_equals_unpacked(dtype: torch.dtype) -> None:
    sequences = random_sequences(11, num=6)
    tokens = packed(sequences, dtype=dtype)
    alone = [packed([sequence], dtype=dtype) for sequence in sequences]

    for choices in KINDS:
        loss = loss_for(choices)
        total = sum(loss(one).loss.item() for one in alone)
        apart = torch.cat([gradients(loss, one)[0] for one in alone])
        assert loss(tokens).loss.item() == pytest.approx(total, rel=1e-5, abs=1e-6), name_of(choices)
        assert torch.allclose(gradients(loss, tokens)[0], apart, rtol=1e-5, atol=1e-6), name_of(choices)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_what_stands_outside_the_mask_changes_nothing(garbage: float) -> None:
    tokens = packed(random_sequences(5))

    def spoilt(values_T: Tensor | None) -> Tensor:
        assert values_T is not None
        return torch.where(tokens.mask_T, values_T.detach(), garbage)

    dirty = replace(
        tokens,
        logprobs_T=spoilt(tokens.logprobs_T).requires_grad_(),
        start_T=spoilt(tokens.start_T),
        behave_T=spoilt(tokens.behave_T),
        advantages_T=spoilt(tokens.advantages_T),
        reference_T=spoilt(tokens.reference_T),
    )
    for choices in KINDS:
        loss = loss_for(choices)
        terms, clean = loss(dirty), loss(tokens)
        assert terms.loss.item() == clean.loss.item(), name_of(choices)
        assert _reported(terms) == _reported(clean), name_of(choices)
        assert torch.equal(gradients(loss, dirty)[0], gradients(loss, tokens)[0]), name_of(choices)


@pytest.mark.parametrize("advantage", [MAX_REWARD, -MAX_REWARD])
@pytest.mark.parametrize("reported", [MAX_LOGPROB, -MAX_LOGPROB, -100.0])
def test_a_loss_is_finite_whatever_a_server_reports_and_a_reward_is(reported: float, advantage: float) -> None:
    tokens = packed(random_sequences(5), dtype=torch.float32)
    like = tokens.behave_T
    lying = replace(tokens, behave_T=torch.full_like(like, reported), advantages_T=torch.full_like(like, 2 * advantage))
    for choices in KINDS:
        terms = loss_for(choices)(lying)
        assert all(map(math.isfinite, [terms.loss.item(), *_reported(terms).values()])), name_of(choices)
        by_logprob, _ = gradients(loss_for(choices), lying)
        assert by_logprob.isfinite().all(), name_of(choices)
        assert math.isfinite(by_logprob.square().sum().item()), name_of(choices)


@pytest.mark.parametrize("log_ratio", [math.inf, 90.0, -90.0, -math.inf])
def test_a_huge_ratio_leaves_loss_gradient_and_reports_finite_and_counts_as_clipped(log_ratio: float) -> None:
    """Of one token to what sampled it (a server may find it impossible), to the step's start and to a reference."""
    drawn = packed(random_sequences(5), dtype=torch.float32)
    far = int(drawn.mask_T.nonzero()[-1])
    plain = drawn.logprobs_T.detach()

    def moved(by: float) -> Tensor:
        return plain.index_add(0, torch.tensor([far]), torch.tensor([-by]))

    tokens = replace(
        drawn,
        behave_T=moved(log_ratio),
        start_T=moved(max(min(log_ratio, 90.0), -90.0)),
        reference_T=moved(log_ratio),
        age_T=torch.zeros_like(drawn.mask_T, dtype=torch.int64),
        keep_T=torch.ones_like(drawn.mask_T),
    )
    presets = {
        f"{name}-{bound}": policy_objective(
            Settings.model_validate({"algorithm": {"name": name}, "rollout": {"max_staleness": bound}})
        )
        for name, bound in itertools.product(PRESETS, (0, 2))
    }
    for name, loss in {**{name_of(choices): loss_for(choices) for choices in KINDS}, **presets}.items():
        for sign in (1.0, -1.0):
            given = replace(tokens, advantages_T=torch.full_like(plain, sign))
            terms = loss(given)
            assert all(map(math.isfinite, [terms.loss.item(), *_reported(terms).values()])), name
            by_logprob, _ = gradients(loss, given)
            assert by_logprob.isfinite().all(), name
            alone = loss(replace(given, mask_T=torch.arange(len(plain)) == far))
            assert alone.sums["clipped"].item() == 1, name


def test_the_clip_fraction_of_cispo_counts_the_weights_that_were_cut() -> None:
    logprobs = torch.full((4,), -1.0)
    ratios = torch.tensor([0.5, 1.0, 4.9, 5.1])

    loss, is_cut = surrogates.cispo(logprobs, ratios.log(), torch.ones(4), eps_clip=1.0, eps_clip_higher=4.0)

    assert loss.tolist() == pytest.approx([0.5, 1.0, 4.9, 5.0])
    assert is_cut.tolist() == [False, False, False, True]


def _reported(terms: LossTerms) -> dict[str, float]:
    return {name: one.item() for name, one in (terms.sums | terms.maxima).items()}


@pytest.mark.parametrize(
    ("missing", "choices"),
    [
        ("sequence_T", Choices(ratio="sequence")),
        ("sequence_T", Choices(correction="reject_sequences")),
        ("age_T", Choices(is_loglinear=True)),
        ("reference", Choices(kl_coef=0.1)),
        ("keep_T", Choices(masks_moment=True)),
    ],
)
def test_what_a_loss_needs_and_does_not_get_is_an_error_not_zeros(missing: str, choices: Choices) -> None:
    field = "reference_T" if missing == "reference" else missing
    tokens = replace(packed(random_sequences(5)), **{field: None})

    with pytest.raises(ValueError, match=f"got no {missing}.*need"):
        loss_for(choices)(tokens)


def test_taken_tokens_are_those_without_a_gradient() -> None:
    for choices in KINDS:
        if choices.surrogate in ("ppo_clip", "dppo_tv") and choices.ratio == "token" and not choices.is_loglinear:
            choices = replace(choices, correction="uncorrected", kl_coef=0.0)
            tokens = packed(random_sequences(9, num=12))
            terms = loss_for(choices)(tokens)

            still = (gradients(loss_for(choices), tokens)[0] == 0) & tokens.mask_T

            assert terms.sums["clipped"].item() == still.sum().item()


@settings(max_examples=20, deadline=None)
@given(seeds)
def test_likelihood_equals_a_plain_loop_and_passes_gradcheck(seed: int) -> None:
    sequences = random_sequences(seed, num=3)
    tokens = packed(sequences)
    expected = -sum(token.logprob for one in sequences for token in one if token.is_trained)

    assert likelihood_loss(tokens).loss.item() == pytest.approx(expected, rel=1e-6)
    assert torch.autograd.gradcheck(
        lambda logprobs_T: likelihood_loss(replace(tokens, logprobs_T=logprobs_T)).loss, (tokens.logprobs_T,)
    )
