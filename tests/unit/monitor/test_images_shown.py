"""An image of a trajectory is shown as one: named on a terminal with where it is, and itself in a report."""

import base64
import dataclasses
import hashlib
import html
import json
from pathlib import Path

import pytest
from msgspec import structs

from areal_async.cli.main import main
from areal_async.config.settings import ModelSettings, RunSettings, Settings
from areal_async.launch.run_directory import RunDirectory
from areal_async.monitor.report import data
from areal_async.monitor.token_views import IdDetokenizer, token_views
from areal_async.rollout.policy.text import TextCodec, load_codec
from areal_async.trainer.output.archive_reader import read_recorded
from areal_async.trainer.packing.rows import TrainRow, unsampled_row
from areal_async.vision.images import take_image
from tests.unit.trainer.archives import REWARDS, archive_seen_rows, line, write_lines
from tests.unit.trainer.seeing import png
from tools.make_tiny_vision import IMAGE_PAD, write_folder

LARGE = png(0, width=128, height=64)
"""An image of 8 tokens, where the small ones have 4."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a tiny Qwen3-VL."""
    return write_folder(tmp_path_factory.mktemp("model"), family="qwen3_vl")


@pytest.fixture
def run(model: Path, tmp_path: Path) -> RunDirectory:
    """Return a run of one archived step that has shown images, whose broker was never started."""
    directory = RunDirectory(tmp_path / "made")
    directory.write_settings(
        Settings(run=RunSettings(name="made", directory=tmp_path), model=ModelSettings(path=str(model)))
    )
    codec = load_codec(str(model))
    archive_seen_rows(directory.path, 1, [_row(codec, index) for index in range(len(REWARDS))])
    write_lines(directory.path, line(1, num_tokens=8))
    return directory


def _row(codec: TextCodec, index: int) -> TrainRow:
    """Return a question that shows two images, and its answer."""
    assert codec.vision is not None
    images = [take_image(one, codec.vision) for one in (LARGE, png(index + 1, width=64, height=64))]
    parts = [{"type": "image"}, {"type": "text", "text": " or "}, {"type": "image"}]
    prompt = codec.expand(codec.encode(codec.render([{"role": "user", "content": parts}])), images)
    answer = codec.encode("the <b>first")
    row = unsampled_row(prompt + answer, [False] * len(prompt) + [True] * len(answer), index=index)
    return dataclasses.replace(row, images=tuple(one.data for one in images))


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _large(run: RunDirectory) -> str:
    (recorded, *_) = read_recorded(list(run.path.glob("trajectories/*")))
    (sequence,) = recorded.trajectory.sequences
    return (sequence.images or [])[0].sha256


def test_a_trajectory_names_each_image_once_and_where_it_is(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "240")

    assert main(["trajectories", "--run", str(run.path), "--show", "0-1-0.0", "--tokens"]) == 0

    told, sha256 = capsys.readouterr().out, _large(run)
    assert (
        f"<|vision_start|>[image 1: 128x64, sha256 {sha256[:12]}…]<|vision_end|> or <|vision_start|>[image 2: 64x64, "
        in told
    )
    assert IMAGE_PAD not in told
    assert f"images, in {run.path}/images/step-000001-1-*.parquet:" in told
    assert f"sha256 {sha256}, 128x64, " in told
    assert "(part of the next)" not in told  # nor do the placeholders have lines of their own in the table


def test_a_stored_trajectory_names_the_stream_of_its_images(run: RunDirectory) -> None:
    from areal_async.cli.trajectories import _images_in
    from areal_async.monitor.trajectory_list import archived

    entry = next(archived(run.path))

    assert _images_in(run, entry, None) == "the stream AREAL_made_IMAGES, subjects areal.made.images.0-1-0.*"


def test_an_export_names_the_images_of_each_sequence(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    import pyarrow.parquet as pq

    for suffix in ("jsonl", "parquet"):
        words = ["trajectories", "--run", str(run.path), "--export", str(run.path / f"out.{suffix}")]
        assert main(words) == 0
    rows = [json.loads(one) for one in (run.path / "out.jsonl").read_text().splitlines()]

    for exported in (rows, pq.read_table(run.path / "out.parquet").to_pylist()):
        (sequence,) = exported[0]["sequences"]
        assert [(one["sha256"], one["width"], one["height"]) for one in sequence["images"]][0] == (_large(run), 128, 64)


def test_without_the_tokenizer_or_with_other_images_than_tokens_every_token_is_shown(
    run: RunDirectory, model: Path
) -> None:
    (recorded, *_) = read_recorded(list(run.path.glob("trajectories/*")))
    (sequence,) = recorded.trajectory.sequences
    codec = load_codec(str(model))
    short = structs.replace(sequence, images=(sequence.images or [])[:1])

    assert [view.text for view in token_views(sequence, codec)].count("") == 8 + 4 - 2
    for one, decoder in ((short, codec), (sequence, IdDetokenizer())):
        views = token_views(one, decoder)
        assert all(view.image is None and view.text for view in views)


def test_a_report_shows_the_pictures_of_its_samples_as_far_as_there_is_room(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = run.path / "out.html"

    assert main(["status", "--run", str(run.path), "--html", str(out)]) == 0
    page = out.read_text()
    assert page.count("<img ") == 3 * 2  # the only group has three samples
    assert f'alt="[image 1: 128x64, sha256 {_large(run)[:12]}…]"' in page
    urls = {one.partition('"')[0] for one in page.split('src="data:image/png;base64,')[1:]}
    assert _large(run) in {_sha256(base64.b64decode(url, validate=True)) for url in urls}
    assert html.escape(IMAGE_PAD) not in page

    monkeypatch.setattr(data, "MAX_PICTURE_BYTES", 1)
    assert main(["status", "--run", str(run.path), "--html", str(out)]) == 0
    page = out.read_text()
    assert "<img " not in page
    assert f"[image 1: 128x64, sha256 {_large(run)[:12]}…]" in page
