"""What is pushed is the folder, to a private repository; where that cannot be, the folder stays for another time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from areal_async.cli.main import main
from areal_async.errors import UserError
from tests.unit.hub.hub_server import TOKEN, Hub


@pytest.fixture
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def _push(run: Path, *words: str, name: str = "ann/made") -> int:
    return main(["export", "--run", str(run), "--push", name, *words])


@pytest.mark.usefixtures("token")
def test_a_data_set_is_pushed_as_its_folder_is(run: Path, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert _push(run, "--trajectories") == 0

    folder = run / "hub" / "trajectories_1-3"
    assert hub.files["datasets/ann/made"] == {".gitattributes": b"", **_files(folder)}
    assert [(one["type"], one["name"], one["organization"], one["visibility"]) for one in hub.made] == [
        ("dataset", "made", "ann", "private")
    ]
    assert set(hub.cards) == {(folder / "README.md").read_text()}
    assert f"Bearer {TOKEN}" in hub.tokens
    assert f"{hub.url}/datasets/ann/made: pushed" in capsys.readouterr().out


def test_a_model_is_pushed_by_the_command_as_its_folder_is(checkpointed: Path, hub: Hub, tmp_path: Path) -> None:
    told = subprocess.run(
        [sys.executable, "-m", "areal_async", "export", "--run", str(checkpointed), "--to", str(tmp_path / "model"),
         "--push", "made"],
        env={**os.environ, "HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN, "HF_HUB_DISABLE_XET": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert told.returncode == 0, told.stderr
    assert told.stdout.splitlines()[-1].startswith(f"{hub.url}/ann/made: pushed")
    assert hub.files["models/ann/made"] == {".gitattributes": b"", **_files(tmp_path / "model")}


@pytest.mark.usefixtures("token")
def test_files_of_an_earlier_push_do_not_mix_with_this_one(run: Path, hub: Hub) -> None:
    hub.files["datasets/ann/made"] = {"data/train-00001.parquet": b"old", "mine.md": b"mine"}

    assert _push(run, "--trajectories") == 0

    files = hub.files["datasets/ann/made"]
    assert "data/train-00001.parquet" not in files
    assert files["mine.md"] == b"mine"


def test_without_a_token_the_folder_stays_and_is_pushed_later_as_it_is_then(
    run: Path, hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _push(run, "--trajectories") == 1

    folder = run / "hub" / "trajectories_1-3"
    assert capsys.readouterr().err == (
        "--push ann/made: got no token of the hub, need one that may write, as HF_TOKEN; "
        f"{folder} has it all: give the command again then\n"
    )
    assert not hub.made
    card = folder / "README.md"
    card.write_text(card.read_text() + "\nThanks to Bob.\n")
    monkeypatch.setenv("HF_TOKEN", TOKEN)

    assert _push(run, "--trajectories") == 0

    assert hub.files["datasets/ann/made"]["README.md"].endswith(b"Thanks to Bob.\n")


@pytest.mark.usefixtures("token")
@pytest.mark.parametrize("url", ["http://127.0.0.1:9", None])
def test_a_hub_that_does_not_answer_is_told_in_a_sentence(
    url: str | None, run: Path, hub: Hub, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if url is None:
        monkeypatch.setenv("HF_TOKEN", "hf_refused")
    else:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)

    assert _push(run, "--trajectories") == 1

    told = capsys.readouterr().err
    assert told.startswith(f"--push ann/made: {url or hub.url} did not take it (")
    assert told.endswith("has it all: give the command again then\n")
    assert (run / "hub" / "trajectories_1-3" / "README.md").exists()


@pytest.mark.usefixtures("token")
def test_a_secret_that_has_got_into_the_folder_is_not_pushed(
    run: Path, hub: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run.parent / "rows"
    assert main(["export", "--run", str(run), "--trajectories", "--to", str(folder)]) == 0
    (folder / "notes.md").write_text(f"my token is {TOKEN}")

    assert _push(run, "--trajectories", "--to", str(folder)) == UserError.exit_code

    assert "export: notes.md would have the value of" in capsys.readouterr().err
    assert not hub.made


@pytest.mark.usefixtures("token")
def test_a_folder_of_something_else_is_not_pushed(run: Path, hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    folder = run.parent / "rows"
    assert main(["export", "--run", str(run), "--trajectories", "--version", "1", "--to", str(folder)]) == 0

    for place in (folder, run.parent / "home"):
        assert _push(run, "--trajectories", "--to", str(place)) == UserError.exit_code
        assert f"export: {place} is there already; remove it, or name another --to" in capsys.readouterr().err
    assert not hub.made


@pytest.mark.parametrize("name", ["a/b/c", "a b", "", "--x", "a..b"])
def test_what_is_no_name_of_a_repository_is_refused_before_the_work(
    name: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", "--run", str(run), "--trajectories", f"--push={name}"]) == UserError.exit_code

    assert f"--push: got {name!r}, need OWNER/NAME" in capsys.readouterr().err
    assert not (run / "hub").exists()
