"""The training step of every preset, declared as a graph of model function calls. No torch.

The first two calls run before the trainer's own: ``generate`` on the nodes, whose trajectories come over the bus, and
``batch`` where the ranks agree on what they train. The trainer does the rest, in this graph's order.
"""

from collections.abc import Iterator

from areal_async.algorithms.dataflow import CallKind, FunctionCall, Graph
from areal_async.algorithms.user_calls import read_call
from areal_async.config.algorithm import AlgorithmSettings
from areal_async.config.settings import Settings
from areal_async.errors import UserError

ELSEWHERE = ("generate", "batch")
"""Calls that are done when the trainer's part of the graph begins."""


def step_graph(settings: Settings) -> Graph:
    """Return the checked graph of one training step, as the settings want it.

    Raises:
        UserError: the calls do not fit together, or one of the user's own is not there.
    """
    algorithm = settings.algorithm
    has_critic = algorithm.advantage_baseline == "critic"
    # Rewards that still change, or that a critic's values come off, are no advantages yet.
    credit = "outcomes" if has_critic or algorithm.has_kl_reward else "advantages"
    calls = (
        FunctionCall(
            name="generate",
            kind=CallKind.GENERATE,
            role="actor",
            inputs=("prompts",),
            outputs=("trajectories", "rewards"),
        ),
        _compute("batch", ("trajectories", "rewards"), ("rows", credit)),
        *_inference(settings),
        *_advantages(has_critic=has_critic, has_kl_reward=algorithm.has_kl_reward),
        _train("actor", ("rows", "advantages", *_columns(settings))),
    )
    wanted = ("kl_mean",) * algorithm.has_kl_reward + ("critic_stats", "value_quality") * has_critic
    graph = Graph(calls=calls, given=("prompts",), results=("actor_stats", *wanted))
    for spec in algorithm.calls:
        call = read_call(spec)
        if "rows" in call.outputs or "outcomes" in call.outputs and not has_critic:
            raise UserError(
                f"algorithm.calls: got {spec}, which makes {call.outputs[0]}, need advantages: all "
                "else is told by the place of its row"
            )
        graph = graph.having(call)
    graph = graph.checked(roles(algorithm))
    graph.rest(ELSEWHERE).checked(roles(algorithm))  # a call of the user's own comes after those
    return graph


def roles(algorithm: AlgorithmSettings) -> tuple[str, ...]:
    """Return the models that the trainer holds."""
    return ("actor", *algorithm.needs_models)


def _compute(name: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> FunctionCall:
    return FunctionCall(name=name, kind=CallKind.COMPUTE, inputs=inputs, outputs=outputs)


def _train(role: str, inputs: tuple[str, ...]) -> FunctionCall:
    return FunctionCall(name=f"train_{role}", kind=CallKind.TRAIN, role=role, inputs=inputs, outputs=(f"{role}_stats",))


def _advantages(*, has_critic: bool, has_kl_reward: bool) -> Iterator[FunctionCall]:
    """Yield the calls that make advantages of outcomes, and the critic's training; none where rewards say it all."""
    penalties = ("penalties",) * has_kl_reward
    if has_kl_reward:
        logprobs = ("start_logprobs", "reference_logprobs")
        yield _compute("kl_penalty", ("rows", *logprobs), ("penalties", "kl_mean"))
    if has_critic:
        made = ("advantages", "returns", "value_quality")
        yield _compute("gae", ("rows", "outcomes", "values", *penalties), made)
        yield _train("critic", ("rows", "values", "returns"))
    elif has_kl_reward:
        yield _compute("penalised_advantages", ("rows", "outcomes", "penalties"), ("advantages",))


def _inference(settings: Settings) -> list[FunctionCall]:
    """Return the forward passes over the batch by the weights that the step starts from."""
    algorithm = settings.algorithm
    wanted = [
        ("start_logprobs", "actor", algorithm.has_kl_reward or _has_proximal_pass(settings)),
        ("reference_logprobs", "reference", "reference" in algorithm.needs_models),
        ("values", "critic", "critic" in algorithm.needs_models),
    ]
    return [
        FunctionCall(name=name, kind=CallKind.INFERENCE, role=role, inputs=("rows",), outputs=(name,))
        for name, role, is_wanted in wanted
        if is_wanted
    ]


def _columns(settings: Settings) -> tuple[str, ...]:
    """Return what the policy's loss looks at besides advantages."""
    algorithm = settings.algorithm
    has_kl_loss = algorithm.kl_coef > 0 and algorithm.kl_in == "loss"
    return ("start_logprobs",) * _has_proximal_pass(settings) + ("reference_logprobs",) * has_kl_loss


def _has_proximal_pass(settings: Settings) -> bool:
    """Whether the proximal logprobs need a pass: after the first of several updates the weights are others."""
    algorithm = settings.algorithm
    is_loglinear = settings.uses_decoupled_loss and algorithm.proximal == "loglinear"
    return algorithm.num_minibatches > 1 and not is_loglinear
