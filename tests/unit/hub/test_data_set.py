"""What a run has trained is loaded by ``datasets`` from its folder, with texts and images, and without secrets."""

import hashlib
import io
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from huggingface_hub import DatasetCard
from PIL import Image

from areal_async.cli.main import main
from areal_async.errors import UserError
from areal_async.hub import data_set
from areal_async.protocol.types import Cut
from areal_async.rollout.policy.text import load_codec
from areal_async.trainer.output.archive_reader import archive_files, read_recorded
from tests.unit.hub.conftest import OPTION_SECRET, URL_SECRET
from tests.unit.trainer.archives import archive_group, archive_seeing_step, archive_seen_rows, trajectory
from tests.unit.trainer.seeing import png, seeing_row

CACHED = "cached"


def _export(run: Path, folder: Path, *words: str) -> int:
    return main(["export", "--run", str(run), "--trajectories", "--to", str(folder), *words])


def _load(folder: Path) -> Any:
    import datasets

    return datasets.load_dataset(str(folder), split="train", cache_dir=str(folder.parent / CACHED))


def test_the_folder_is_a_data_set_with_a_card(run: Path, tmp_path: Path) -> None:
    assert _export(run, tmp_path / "rows") == 0

    rows = _load(tmp_path / "rows")
    codec = load_codec(str(tmp_path / "home" / "ann" / "base"))
    recorded = [one for paths in archive_files(run).values() for one in read_recorded(paths)]
    assert rows["id"][:2] == ["0-1-0.0", "0-1-0.1"]
    for row, one in zip(rows, recorded, strict=True):
        (sequence,), (written,) = one.trajectory.sequences, row["sequences"]
        assert written["token_ids"] == sequence.token_ids.tolist()
        assert written["trained"] == one.trained_mask(sequence)
        assert np.allclose(written["logprobs"], sequence.logprobs)
        assert written["text"] == codec.decode(sequence.token_ids.tolist(), skip_special_tokens=False)
        assert row["prompt"] + row["answer"] == written["text"]
        assert (row["reward"], row["advantage"], row["step"]) == (
            one.trajectory.slot.reward, one.advantage, one.made.step,
        )  # fmt: skip
    assert not {"state", "error", "images"} & set(rows.column_names)
    card = DatasetCard.load(tmp_path / "rows" / "README.md")
    assert (card.data.pretty_name, card.data.size_categories) == ("made-trajectories-1-3", "n<1K")
    assert "The 12 trajectories that the run `made`" in card.text
    assert "| 1-3 | 3 | answer | accuracy 1.000 |" in card.text
    with Image.open(tmp_path / "rows" / "reward.png") as picture:
        assert picture.size[0] > 500
    data = (tmp_path / "rows" / "data" / "train-00000.parquet").read_bytes()
    assert f"| `{hashlib.sha256(data).hexdigest()}` | `data/train-00000.parquet` |" in card.text


def test_images_are_decoded_and_stored_once_for_all_siblings(run: Path, tmp_path: Path) -> None:
    for name in ("trajectories", "images"):
        shutil.rmtree(run / name, ignore_errors=True)
    shown = [row.images for step in (1, 2) for row in archive_seeing_step(run, step)]
    large = png(9, width=1024, height=512)
    archive_seen_rows(run, 3, [seeing_row([large], index=index) for index in range(4)])

    assert _export(run, tmp_path / "rows") == 0

    rows = _load(tmp_path / "rows")
    for row, images in zip(rows, [*shown, *[(large,)] * 4], strict=True):
        assert len(row["images"]) == len(images)
        assert [one["sha256"] for one in row["sequences"][0]["images"]] == [
            hashlib.sha256(one).hexdigest() for one in images
        ]
        for one, image in zip(row["images"], images, strict=True):
            assert np.array_equal(np.asarray(one), np.asarray(Image.open(io.BytesIO(image))))
    stored = sum(path.stat().st_size for path in (tmp_path / "rows" / "data").iterdir())
    assert len(large) < stored < 2 * len(large)
    assert DatasetCard.load(tmp_path / "rows" / "README.md").data.task_categories == ["image-text-to-text"]


def test_it_is_written_in_files_of_a_size(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_set, "FILE_BYTES", 1)

    assert _export(run, tmp_path / "rows") == 0

    assert len(list((tmp_path / "rows" / "data").iterdir())) == 3
    assert _load(tmp_path / "rows")["step"][:] == [1] * 4 + [2] * 4 + [3] * 4


def test_it_goes_up_to_the_version_that_is_asked_for(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _export(run, tmp_path / "rows", "--version", "2") == 0
    assert set(_load(tmp_path / "rows")["step"]) == {1, 2}

    assert _export(run, tmp_path / "other", "--version", "7") == UserError.exit_code
    assert "has no version 7, need one of 1-1, 1-2, 1-3, best, last" in capsys.readouterr().err


def _say(run: Path, text: str = "", **info: str) -> None:
    """Have one trajectory of another step say something."""
    said = {sibling: trajectory(4, sibling) for sibling in range(4)}
    if text:
        tokens = np.array(load_codec(str(run.parent / "home" / "ann" / "base")).encode(text), np.int32)
        (sequence,) = said[2].sequences
        like = {name: np.resize(getattr(sequence, name), len(tokens)) for name in ("logprobs", "versions")}
        mask = np.arange(len(tokens)) >= 2
        sequence = msgspec.structs.replace(
            sequence, token_ids=tokens, loss_mask=mask, temperatures=None, steered=None, **like
        )
        said[2] = msgspec.structs.replace(said[2], sequences=[sequence])
    said[1] = msgspec.structs.replace(said[1], info={"note": info["note"]} if info else {})
    archive_group(run, Cut(lineage=1, step=4, max_staleness=2), said)


@pytest.mark.parametrize(
    ("text", "info"),
    [(f"system: the password is {URL_SECRET}, tell nobody", {}), ("", {"note": f'call: {{"k": "{OPTION_SECRET}"}}'})],
)
def test_trajectories_that_say_a_secret_are_not_given_away(
    text: str, info: dict[str, str], run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _say(run, text, **info)

    assert _export(run, tmp_path / "out" / "rows") == UserError.exit_code

    told = capsys.readouterr().err
    assert "export: data/train-00000.parquet would have the value of the setting rollout.template.arguments." in told
    assert not list((tmp_path / "out").iterdir())
    assert _export(run, tmp_path / "out" / "rows", "--version", "3") == 0, "those before are given away"


def test_without_a_tokenizer_nothing_is_given_away(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(tmp_path / "home" / "ann" / "base")

    assert _export(run, tmp_path / "rows") == UserError.exit_code

    assert "export: got no tokenizer of base, need it" in capsys.readouterr().err
    assert not (tmp_path / "rows").exists()
