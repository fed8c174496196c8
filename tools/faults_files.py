"""Faults of the disk: what was written is not what is read, or is not there."""

import random
import signal
from pathlib import Path

from areal_async.process.atomic_folders import versions_in
from areal_async.trainer.engine.digests import damage, set_aside_in
from tools.faults_cases import Case, row
from tools.faults_run import send_signal

NUM_STEPS = 12


@row("30", "a bit flips in the newest checkpoint", is_random=True, is_quick=True)
def flipped_bit(case: Case) -> None:
    run = case.new_run(run__steps=NUM_STEPS, trainer__keep_checkpoints=NUM_STEPS)
    run.start()
    run.wait_for_step(NUM_STEPS // 2)
    run.stop()
    checkpoints = run.directory / "checkpoints"
    *_, newest = versions_in(checkpoints)
    parts = sorted(path for path in (checkpoints / str(newest)).rglob("*") if path.stat().st_size and path.is_file())
    path = case.rng.choice(parts)
    _flip_bit(path, case.rng)
    case.note(f"a bit of {path.relative_to(checkpoints)}")
    trained = {line["step"]: (line["reward_mean"], line["num_tokens"]) for line in run.steps}

    run.start()
    case.recovered(run.wait_for_progress())
    run.finish()

    case.check_steps()
    case.check(len(set_aside_in(checkpoints)) == 1, "the damaged checkpoint was not set aside")
    case.check(f"{newest}: " in run.output, "the terminal does not name the damaged checkpoint")
    case.check(not any(damage(checkpoints / str(one)) for one in versions_in(checkpoints)), "another one is damaged")
    again = {line["step"]: (line["reward_mean"], line["num_tokens"]) for line in run.steps if line["step"] in trained}
    case.check(again == trained, f"replayed steps are not those that were trained: {again}, need {trained}")


@row("31", "a bit flips in weights that no server has loaded yet", is_random=True)
def flipped_weights(case: Case) -> None:
    point = "trainer.before_announce"
    run = case.new_run(run__steps=NUM_STEPS, faults=f"{point}:4:stop", rollout__max_staleness=0)
    run.start()
    run.wait_until(lambda: run.has_fired(point) or not run.is_alive, f"{point} to strike")
    *_, newest = versions_in(run.directory / "weights")
    _flip_bit(run.directory / "weights" / str(newest) / "model.safetensors", case.rng)
    send_signal(run.role_pid("trainer"), signal.SIGCONT)
    case.recovered(run.wait_for_progress())
    run.finish()

    case.check_steps()
    case.check(bool(run.events("node-0", "weights.unreadable")), "no server has seen that the weights are damaged")
    died = [event for event in run.events("launcher", "process.died") if event["process"].startswith("trainer")]
    case.check(len(died) == 1, f"the trainer was started again {len(died)} times, need once")


@row("32", "a part of the store is gone", is_quick=True)
def lost_part(case: Case) -> None:
    run = case.new_run(run__steps=NUM_STEPS)
    run.start()
    run.wait_for_step(NUM_STEPS // 2)
    run.stop()
    metrics, names = run.directory / "metrics.jsonl", run.settings().names
    (streams,) = (run.directory / "bus" / "jetstream").rglob("streams")
    before = metrics.read_bytes()
    for part in (names.outcomes_stream, f"KV_{names.bucket}"):
        (streams / part).rename(case.directory / part)
        run.start()
        case.check(run.wait_end() == 2, f"without {part} the run did not end with status 2")
        case.check(f"has lost {part} (" in run.last_words(), f"the last words do not name {part}: {run.last_words()}")
        case.check(metrics.read_bytes() == before, f"without {part} metrics.jsonl was changed")
        case.check(not (streams / part).exists(), f"{part} was made anew")
        (case.directory / part).rename(streams / part)

    run.start()
    case.recovered(run.wait_for_progress())
    run.finish()

    case.check_steps()


def _flip_bit(path: Path, rng: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
