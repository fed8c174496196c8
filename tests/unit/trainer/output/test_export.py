"""A checkpoint becomes a folder that transformers and the trainer load, as the trainer itself would have written it."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file

from areal_async.cli.export import write_best
from areal_async.cli.main import main
from areal_async.config.settings import ModelSettings, Settings
from areal_async.errors import UserError
from areal_async.inference.weight_group import num_bytes
from areal_async.launch.run_directory import RunDirectory
from areal_async.serving.folders import RunVersions
from areal_async.trainer.engine.checkpoint import STATE
from areal_async.trainer.engine.engines import Engines
from areal_async.trainer.engine.parallel.ranks import Ranks
from areal_async.trainer.output.export import export_policy
from tests.unit.trainer.counted_memory import count
from tests.unit.trainer.models import engine_of, parameters_differ, random_rows, save_model


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_exported_checkpoint_is_the_folder_that_the_trainer_writes(
    model: Path, ranks: Ranks, tmp_path: Path, dtype: str
) -> None:
    engine = engine_of(model, ranks, dtype=dtype)
    engine.train_step(random_rows(6), step=1, total_steps=2)
    Engines(actor=engine).save_checkpoint(tmp_path / "1-1", b"")
    engine.save_weights(tmp_path / "direct")

    export_policy(
        tmp_path / "1-1",
        tmp_path / "exported",
        model=ModelSettings.model_validate({"path": str(model), "dtype": dtype}),
    )

    exported, direct = (load_file(tmp_path / name / "model.safetensors") for name in ("exported", "direct"))
    assert exported.keys() == direct.keys()
    assert all(
        torch.equal(exported[name], direct[name]) and exported[name].dtype == direct[name].dtype for name in direct
    )
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("exported", "direct")]
    assert configs[0] == configs[1]
    assert (tmp_path / "exported" / "tokenizer.json").exists()


def test_a_checkpoint_of_another_model_is_refused(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    Engines(actor=engine_of(model, ranks)).save_checkpoint(tmp_path / "1-1", b"")
    other = save_model(tmp_path / "other", num_layers=3)

    with pytest.raises(UserError, match=r"of another model than model.path: got none for model.layers.2.* need one of"):
        export_policy(tmp_path / "1-1", tmp_path / "exported", model=ModelSettings(path=str(other), dtype="float32"))

    assert not list(tmp_path.glob("*exported*"))


def test_an_export_has_a_file_in_memory_at_a_time(
    model: Path, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("areal_async.trainer.engine.model_folder.FILE_BYTES", 12_000)
    engine = engine_of(model, ranks)
    Engines(actor=engine).save_checkpoint(tmp_path / "1-1", b"")
    settings = ModelSettings(path=str(model), dtype="float32")

    hashes, counted = count(lambda: export_policy(tmp_path / "1-1", tmp_path / "exported", model=settings))

    largest = max(num_bytes(bucket) for bucket in engine.folder.files)
    assert len(hashes) > 2
    assert counted.peak <= 2 * largest + 4096, "a file, a shard, and what is computed instead of stored"
    assert hashes == engine.save_weights(tmp_path / "direct")


def test_training_starts_from_an_exported_folder(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    engine = engine_of(model, ranks)
    engine.train_step(random_rows(6), step=1, total_steps=2)
    Engines(actor=engine).save_checkpoint(tmp_path / "1-1", b"")

    export_policy(tmp_path / "1-1", tmp_path / "exported", model=ModelSettings(path=str(model), dtype="float32"))

    assert parameters_differ(engine_of(tmp_path / "exported", ranks), engine) == 0


def test_what_is_no_checkpoint_is_refused(model: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="1-1 is not one"):
        export_policy(tmp_path / "1-1", tmp_path / "exported", model=ModelSettings(path=str(model)))


def test_a_checkpoint_that_a_live_run_removes_meanwhile_is_no_traceback(
    model: Path, ranks: Ranks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Engines(actor=engine_of(model, ranks)).save_checkpoint(tmp_path / "1-1", b"")
    shards = sorted((tmp_path / "1-1" / STATE).glob("*.distcp"))

    class ReadsAsItGoes(dcp.FileSystemReader):
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            for shard in shards:
                shard.unlink(missing_ok=True)

    def export() -> None:
        export_policy(tmp_path / "1-1", tmp_path / "exported", model=ModelSettings(path=str(model)))

    monkeypatch.setattr(dcp, "FileSystemReader", ReadsAsItGoes)
    assert shards
    with pytest.raises(UserError, match="1-1 has gone meanwhile, as its run keeps the newest alone; take a newer one"):
        export()
    assert not (tmp_path / "exported").exists()

    with pytest.raises(UserError, match=r"1-1: state/__0_0.distcp is missing; take another one"):
        export()  # what was damaged before is another matter


def test_a_damaged_checkpoint_is_not_exported(model: Path, ranks: Ranks, tmp_path: Path) -> None:
    Engines(actor=engine_of(model, ranks)).save_checkpoint(tmp_path / "1-1", b"")
    shard = tmp_path / "1-1" / STATE / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 64
    shard.write_bytes(content)

    with pytest.raises(UserError, match=r"1-1: state/__0_0.distcp is not what was written: its SHA-256 differs"):
        export_policy(tmp_path / "1-1", tmp_path / "exported", model=ModelSettings(path=str(model)))
    assert not (tmp_path / "exported").exists()


@pytest.fixture
def run(model: Path, ranks: Ranks, tmp_path: Path) -> Path:
    """Return the directory of a run with two checkpoints, the first of which earned more."""
    engine = engine_of(model, ranks)
    lines = []
    for step, reward in ((1, 0.9), (2, 0.1)):
        Engines(actor=engine).save_checkpoint(tmp_path / "run" / "checkpoints" / f"1-{step}", b"")
        lines.append(json.dumps({"step": step, "weights_version": f"1-{step}", "reward_mean": reward}))
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(lines))
    settings = Settings.model_validate(
        {"model": {"path": str(model), "dtype": "float32"}, "trainer": {"checkpoint_every_steps": 1}}
    )
    RunDirectory(tmp_path / "run").write_settings(settings)
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("given", "exported"), [((), "1-2"), (("--checkpoint", "best"), "1-1"), (("--version", "1"), "1-1")]
)
def test_the_verb_exports_the_last_one_or_the_best(
    run: Path, given: tuple[str, ...], exported: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "--run", str(run), *given]) == 0

    assert f"the model of checkpoint {exported}," in capsys.readouterr().out
    assert (run / f"model_{exported}" / "model.safetensors").exists()


@pytest.mark.anyio
async def test_a_version_that_is_served_is_exported_once(run: Path) -> None:
    versions = RunVersions(run, run / "served" / "models", str)

    async with versions.held("1-1") as folder, versions.held("1-1") as again:
        assert folder == again
        assert (folder / "model.safetensors").exists()
        assert (folder / "tokenizer.json").exists()


@pytest.mark.parametrize(
    ("place", "cause"),
    [("/proc/zz", "No such file or directory"), ("x" * 246, "File name too long"), ("x" * 300, "File name too long")],
)
def test_a_folder_that_cannot_be_made_is_refused_before_the_work(
    run: Path, place: str, cause: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name has others while it is written, which are longer."""
    monkeypatch.setattr("areal_async.cli.export.write", pytest.fail)
    place = str(run.parent / place)

    assert main(["export", "--run", str(run), "--output", place]) == 2

    assert f"--output: got {place}, need what can be written: {cause}; " in capsys.readouterr().err


def test_a_finished_run_leaves_the_best_where_it_is_asked_for(run: Path) -> None:
    settings = RunDirectory(run).read_settings()
    settings = settings.model_copy(
        update={"run": settings.run.model_copy(update={"directory": run.parent, "name": run.name})}
    )
    write_best(settings)
    assert not (run / "model_best").exists()

    write_best(settings.model_copy(update={"trainer": settings.trainer.model_copy(update={"keep_best": "reward"})}))

    assert (run / "model_best" / "model.safetensors").exists()
    assert (run / "checkpoints" / "best").resolve().name == "1-1"


def test_the_verb_says_which_checkpoints_there_are(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "--run", str(run), "--checkpoint", "1-9"]) == UserError.exit_code

    assert "has no checkpoint 1-9, need one of 1-1, 1-2" in capsys.readouterr().err
    assert main(["export", "--run", str(run), "--checkpoint", "1-1", "--version", "1-2"]) == UserError.exit_code
    assert capsys.readouterr().err == "--checkpoint: got --version as well, need one of the two\n"


def test_the_verb_writes_over_nothing(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    leads_nowhere = run.parent / "link"
    leads_nowhere.symlink_to("nowhere")
    for place in (run, leads_nowhere):
        assert main(["export", "--run", str(run), "--output", str(place)]) == UserError.exit_code
        assert f"export: {place} is there already" in capsys.readouterr().err
