"""A compiled model is the eager one, and rows of new lengths need no new graphs.

Graphs run as torch traced them: kernels are the compiler's matter, and cost seconds each.
"""

from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import config as inductor

from areal_async.config.settings import Settings, TrainerSettings
from areal_async.doctor.preflight.findings import Level, guarded
from areal_async.doctor.preflight.software import check_compiler
from areal_async.errors import UserError
from areal_async.trainer.engine import compiled
from areal_async.trainer.engine.engines import Engines
from areal_async.trainer.engine.parallel.ranks import Ranks
from tests.unit.trainer.engine.test_critic import critic_of, with_targets
from tests.unit.trainer.models import engine_of, parameters_differ, random_rows, save_model
from tests.unit.trainer.one_of_two_compiling import WITH_REFERENCE, num_graphs, train_compiled, train_three_steps
from tests.unit.trainer.rank_workers import RankWorkers
from tests.unit.trainer.trained_steps import NUM_STEPS, TrainedSteps, batch_rows

# torch looks at it while it traces, and lets the warning be seen once.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),
    pytest.mark.timeout(300),
]

LAYER_GRAPHS = 4
"""Around its attention module, and in that around attention."""


@pytest.fixture(autouse=True)
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace the forward pass alone, which decides what a graph is used for."""
    monkeypatch.setattr(compiled, "BACKEND", "eager")


def test_steps_of_other_lengths_take_the_graphs_of_the_first_and_learn_the_same(
    model: Path, ranks: Ranks, tmp_path: Path
) -> None:
    """With layers that recompute. Checkpoints are those of eager layers."""
    torch._dynamo.reset()
    engine, eager = engine_of(model, ranks, compile=True, activation_checkpointing=True), engine_of(model, ranks)
    counters.clear()  # of the look at the compiler

    for step in range(1, 51):
        rows = random_rows(1 + step % 5, seed=step)
        stats = engine.train_step(rows, step=step, total_steps=50)
        if step < 4:
            expected = eager.train_step(rows, step=step, total_steps=50)
            assert (stats.loss, stats.grad_norm) == pytest.approx(
                (expected.loss, expected.grad_norm), rel=1e-4, abs=1e-6
            )
            assert parameters_differ(engine, eager) < 1e-4

    assert num_graphs() == LAYER_GRAPHS
    logprobs = [engine.logprobs(random_rows(count, seed=count)) for count in (3, 5, 2)]
    assert num_graphs() == 2 * LAYER_GRAPHS
    Engines(actor=engine).save_checkpoint(tmp_path / "checkpoint", b"ledger")
    assert Engines(actor=eager).load_checkpoint(tmp_path / "checkpoint") == b"ledger"
    assert parameters_differ(engine, eager) == 0
    for count, ours in zip((3, 5, 2), logprobs, strict=True):
        for one, other in zip(eager.logprobs(random_rows(count, seed=count)), ours, strict=True):
            assert torch.allclose(one, other, atol=1e-5)
    Engines(actor=eager).save_checkpoint(tmp_path / "eager", b"ledger")
    assert Engines(actor=engine).load_checkpoint(tmp_path / "eager") == b"ledger"


def test_a_compiled_critic_learns_as_an_eager_one(model: Path, ranks: Ranks) -> None:
    norms = []
    for on in (True, False):
        critic = critic_of(model, ranks, compile=on)
        rows = with_targets(critic, random_rows(5))
        norms.append([critic.train_step(rows, step=step, total_steps=2).value_grad_norm for step in (1, 2)])

    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_layers_with_and_without_windows_and_adapters_do_not_share_their_graphs(ranks: Ranks, tmp_path: Path) -> None:
    windows = {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 4}
    model = save_model(tmp_path / "qwen2", family="qwen2", **windows)
    rows, lora = random_rows(6), {"rank": 2, "target_modules": ["o_proj"]}
    engine, eager = (engine_of(model, ranks, compile=on, lora=lora) for on in (True, False))
    eager.train_step(rows, step=1, total_steps=1)  # before it adapters change nothing
    Engines(actor=eager).save_checkpoint(tmp_path / "checkpoint", b"ledger")
    Engines(actor=engine).load_checkpoint(tmp_path / "checkpoint")

    adapted, plain = (
        [one.logprobs(rows) for one in (engine, eager)],
        [one.base_logprobs(rows) for one in (engine, eager)],
    )

    for one, other in zip([*adapted[0], *plain[0]], [*adapted[1], *plain[1]], strict=True):
        assert torch.allclose(one, other, atol=1e-4)
    assert max(float((one - other).abs().max()) for one, other in zip(adapted[0], plain[0], strict=True)) > 1e-2


def test_a_step_whose_backward_pass_is_compiled_too_is_an_eager_one(
    ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that the compiler does before it makes kernels: its operators, and what the backward pass keeps."""
    monkeypatch.setattr(compiled, "BACKEND", "aot_eager_decomp_partition")
    torch._dynamo.reset()
    model, rows = save_model(tmp_path / "one-layer", num_layers=1), random_rows(3)
    engine, eager = (engine_of(model, ranks, compile=on) for on in (True, False))
    autograds = counters["aot_autograd"]["ok"]

    stats, expected = (one.train_step(rows, step=1, total_steps=1) for one in (engine, eager))

    assert counters["aot_autograd"]["ok"] - autograds == LAYER_GRAPHS
    assert (stats.loss, stats.grad_norm) == pytest.approx((expected.loss, expected.grad_norm), rel=1e-4, abs=1e-6)
    assert parameters_differ(engine, eager) < 1e-4


def test_two_ranks_train_compiled_models_as_one_does_eager_ones(
    model: Path, ranks: Ranks, two_ranks: RankWorkers
) -> None:
    """A policy that recomputes beside a frozen reference, where a rank has a step without rows; then two stages."""
    alone = TrainedSteps(model, ranks, **WITH_REFERENCE)
    stats = [alone.train(batch_rows(), step=step) for step in range(1, NUM_STEPS + 1)]
    stages = train_three_steps(engine_of(model, ranks))

    both = two_ranks.run(train_compiled, model)

    for seen in both:
        for together, one in zip(seen["stats"], stats, strict=True):
            assert together == pytest.approx(one, rel=1e-3, abs=1e-5)
        assert seen["num_graphs"] == 2 * LAYER_GRAPHS
        for stage, eager in zip(seen["stages"], stages, strict=True):
            assert stage == pytest.approx(eager, rel=1e-3, abs=1e-6)
    assert both[0]["fingerprint"] == pytest.approx(alone.fingerprint(), rel=1e-5, abs=1e-6)


def test_a_host_without_a_compiler_is_refused_when_the_model_is_loaded(
    model: Path, ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiled, "BACKEND", "inductor")
    torch._dynamo.reset()
    monkeypatch.setattr(inductor.cpp, "cxx", (None, "/nowhere/g++"))

    with pytest.raises(UserError) as raised:
        engine_of(model, ranks, compile=True)

    told = str(raised.value)
    (found,) = guarded("compiler", check_compiler, Settings(trainer=TrainerSettings(compile=True)))
    assert (found.level, f"{found.saw}; {found.cure}") == (Level.ERROR, told), "doctor says so before"
    assert guarded("compiler", check_compiler, Settings()) == []
    assert "compile (InvalidCxxCompiler: No working C++ compiler found" in told
    assert told.endswith("install them, or set it to false")
    assert "\n" not in told


def test_what_a_backend_raises_first_in_a_process_is_told_by_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    class Invalid(RuntimeError):
        pass

    def without_compiler(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> None:
        raise Invalid("no compiler here")

    monkeypatch.setattr(compiled, "BACKEND", without_compiler)
    torch._dynamo.reset()

    with pytest.raises(UserError, match=r"cannot compile \(.*Invalid: no compiler here[)]"):
        compiled.check_compiler(torch.device("cpu"))
