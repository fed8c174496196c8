"""Keys have names, nobody else can read their file, and it is heard as it changes."""

from pathlib import Path

import pytest

from areal_async.errors import UserError
from areal_async.process.file_locks import try_lock
from areal_async.serving.keys import MAX_KEYS, Keyring, add_key

LONG = "sk-0123456789abcdef"


def keyring(path: Path, text: str) -> Keyring:
    path.write_text(text)
    path.chmod(0o600)
    return Keyring(path)


def test_a_key_that_is_made_is_known_by_its_name_and_stands_nowhere(tmp_path: Path) -> None:
    path = tmp_path / "served" / "keys"

    key, other = add_key(path, "ann"), add_key(path, "ben")

    keys = Keyring(path)
    assert [keys.name_of(one) for one in (key, other, "", key[:-1], f"{key} ", "sk-\ud800")] == [
        "ann", "ben", None, None, None, None,
    ]  # fmt: skip
    assert key not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    with pytest.raises(UserError, match="has one called ann already"):
        add_key(path, "ann")
    with pytest.raises(UserError, match="got the name 'a b'"):
        add_key(path, "a b")


def test_of_two_who_add_a_key_at_once_one_is_told_to_come_again(tmp_path: Path) -> None:
    """Else the second would write the file without the first one's key."""
    add_key(tmp_path / "keys", "ann")
    with (tmp_path / "keys.lock").open() as lock:
        assert try_lock(lock)
        with pytest.raises(UserError, match="another process adds one to .* at this moment; try again"):
            add_key(tmp_path / "keys", "ben")

    key = add_key(tmp_path / "keys", "ben")
    assert Keyring(tmp_path / "keys").name_of(key) == "ben"


def test_keys_of_ones_own_are_taken(tmp_path: Path) -> None:
    keys = keyring(tmp_path / "keys", f"# of us\n\nann {LONG}\n")
    key = add_key(tmp_path / "keys", "ben")

    keys.refresh()

    assert (keys.name_of(LONG), keys.name_of(key)) == ("ann", "ben")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "got 0 keys"),
        ("# none\n", "got 0 keys"),
        (f"{LONG}\n", "line 1: need NAME KEY"),
        (f"ann {LONG} more\n", "line 1: need NAME KEY"),
        (f"a/b {LONG}\n", "line 1: need NAME KEY"),
        (f"ann {LONG}\nann {LONG}x\n", "line 2: got a second key called ann"),
        ("ann short\n", "got a key of 5 characters, need 16"),
        ("ann sha256:12\n", "got sha256: without 64"),
        ("".join(f"n{number} {LONG}{number}\n" for number in range(MAX_KEYS + 1)), f"got {MAX_KEYS + 1} keys"),
    ],
)
def test_what_is_no_file_of_keys_is_refused_without_any_key(text: str, why: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=why) as refused:
        keyring(tmp_path / "keys", text)

    assert LONG not in str(refused.value)


def test_a_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"ann {LONG}\n")
    (tmp_path / "keys").chmod(0o640)

    with pytest.raises(UserError, match="mode 640, which others may use, need 600"):
        Keyring(tmp_path / "keys")
    with pytest.raises(UserError, match="cannot read"):
        Keyring(tmp_path / "none")


def test_a_file_is_heard_as_it_changes_and_one_that_is_broken_is_not(tmp_path: Path) -> None:
    keys = keyring(tmp_path / "keys", f"ann {LONG}\nben {LONG}2\n")

    (tmp_path / "keys").write_text(f"ann {LONG}3\n")
    keys.refresh()
    assert [keys.name_of(one) for one in (LONG, f"{LONG}2", f"{LONG}3")] == [None, None, "ann"]

    (tmp_path / "keys").write_text("ann")
    keys.refresh()
    (tmp_path / "keys").unlink()
    keys.refresh()
    assert keys.name_of(f"{LONG}3") == "ann"
