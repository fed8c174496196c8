"""No file with the value of a known secret is let out, however the file writes it."""

import json
import stat
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

from areal_async.errors import UserError
from areal_async.hub import known_secrets
from areal_async.hub.known_secrets import KnownSecrets
from areal_async.launch.run_directory import RunDirectory
from tests.unit.hub.conftest import FLAG_SECRET, KEY_SECRET, OPTION_SECRET, URL_SECRET, VARIABLE_SECRET
from tests.unit.hub.hub_server import TOKEN

SECRET = 'se"cret/ä-value'
KNOWN = KnownSecrets({SECRET: "the test", "short": "nothing"})


def _refusal(known: KnownSecrets, folder: Path) -> str:
    with pytest.raises(UserError) as caught:
        known.refuse_in(folder)
    return str(caught.value)


def _parquet(path: Path, value: object, kind: pa.DataType) -> None:
    filler = pa.array([None] * 999 + [value], kind)
    pq.write_table(pa.table({"x": filler}), path, compression="zstd")


@pytest.mark.parametrize(
    "written",
    [
        SECRET,
        json.dumps(SECRET),
        json.dumps(SECRET, ensure_ascii=False),
        json.dumps(json.dumps(SECRET))[3:-3],
        quote(SECRET),
    ],
)
def test_a_secret_is_found_however_it_is_written(written: str, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "card.md").write_text(f"before {written} after")

    told = _refusal(KNOWN, tmp_path)

    assert "deep/card.md would have the value of the test, need none of it" in told
    assert SECRET not in told


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (SECRET, pa.string()),
        (SECRET, pa.large_string()),
        (SECRET.encode(), pa.binary()),
        (SECRET, pa.dictionary(pa.int32(), pa.string())),
        ([{"text": "x"}, {"text": f"it is {SECRET}."}], pa.list_(pa.struct([("text", pa.string())]))),
        ([{"bytes": SECRET.encode()}], pa.list_(pa.struct([("bytes", pa.binary())]))),
    ],
)
def test_a_secret_is_found_in_compressed_tables_at_any_depth(value: object, kind: pa.DataType, tmp_path: Path) -> None:
    _parquet(tmp_path / "rows.parquet", value, kind)

    assert "rows.parquet would have the value of the test" in _refusal(KNOWN, tmp_path)


def test_a_secret_is_found_across_the_parts_that_a_file_is_read_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_secrets, "CHUNK_BYTES", 7)
    for before in range(14):
        (tmp_path / "text").write_text("." * before + SECRET + "." * 20)
        assert "text would have" in _refusal(KNOWN, tmp_path)


def test_names_of_files_and_headers_of_weights_are_looked_at(tmp_path: Path) -> None:
    known = KnownSecrets({"secret-value": "the test"})
    save_file({"x": np.zeros(4, np.float32)}, tmp_path / "model.safetensors", metadata={"by": "secret-value"})
    assert "model.safetensors would have" in _refusal(known, tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "of secret-value").touch()
    assert "the name of a file would have" in _refusal(known, tmp_path)


def test_other_files_are_let_out(tmp_path: Path) -> None:
    _parquet(tmp_path / "rows.parquet", "a short text", pa.string())
    save_file({"x": np.zeros(4, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "empty").touch()

    KNOWN.refuse_in(tmp_path)
    KnownSecrets({}).refuse_in(tmp_path)


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (FLAG_SECRET, "the setting inference.flags"),
        (OPTION_SECRET, "the setting rollout.template.arguments.apiKey"),
        (URL_SECRET, "the setting rollout.template.arguments.site"),
        (KEY_SECRET, "node.nk"),
        (VARIABLE_SECRET, "the variable JUDGE_API_KEY"),
        ("url-password", "the variable DATABASE"),
        (TOKEN, "the hub's token"),
        ("netrc-password", "the password of api.wandb.ai in ~/.netrc"),
    ],
)
def test_what_is_known_is_from_settings_files_and_the_environment(
    value: str, where: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    netrc = tmp_path / "home" / ".netrc"
    netrc.write_text("machine api.wandb.ai login user password netrc-password\n")
    netrc.chmod(stat.S_IRUSR | stat.S_IWUSR)
    environment = {
        "JUDGE_API_KEY": VARIABLE_SECRET, "DATABASE": "postgres://u:url-password@host/db", "SSH_AUTH_SOCK": str(run),
        "A_KEY": "1",
    }  # fmt: skip
    known = KnownSecrets.of_run(RunDirectory(run).read_settings(), run, environment)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "innocent").write_text(f"a place is {run}, a number 1, a budget of 4096 tokens")
    known.refuse_in(folder)

    (folder / "file").write_text(value)

    told = _refusal(known, folder)
    assert where in told
    assert value not in told
