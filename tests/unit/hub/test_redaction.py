"""Settings on a card have neither secrets nor what they say of a machine, and are whole otherwise."""

import pytest
import yaml

from areal_async.config.settings import Settings
from areal_async.hub.redaction import HIDDEN, LEFT_OUT, SHOWN, Redaction, is_secret_name, shown_settings

AWS = "AKIA" + "A1B2" * 4


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("https://ann:pass@host/a?x=1&api_key=abc#f", f"https://{HIDDEN}@host/a?x=1&api_key={HIDDEN}#f"),
        ("nats://token@host:4222", f"nats://{HIDDEN}@host:4222"),
        ("--api-key abc --tp 2 --admin-api-key=def", f"--api-key {HIDDEN} --tp 2 --admin-api-key={HIDDEN}"),
        ("PASSWORD=abc x=1", f"PASSWORD={HIDDEN} x=1"),
        ("API_KEY='a b' run -v \"C\"", f"API_KEY='{HIDDEN}' run -v \"C\""),
        ("sh -c \"TOKEN=abc run\" --api-key 'a b'", f"sh -c \"TOKEN={HIDDEN} run\" --api-key '{HIDDEN}'"),
        ('x=y command="run API_KEY=abc"', f'x=y command="run API_KEY={HIDDEN}"'),
        ('{"api_key": "a\\"b", "n": 1}', f'{{"api_key": "{HIDDEN}", "n": 1}}'),
        ('"{\\"apiKey\\": \\"a b\\", \\"n\\": 1}"', f'"{{\\"apiKey\\": \\"{HIDDEN}\\", \\"n\\": 1}}"'),
        ('"Authorization": "Bearer a b", 2', f'"Authorization": "Bearer {HIDDEN}", 2'),
        ("x://ann:p@ss@host/a?mail=b@c", f"x://{HIDDEN}@host/a?mail=b@c"),
        ("Authorization: Bearer abcdefghij", f"Authorization: Bearer {HIDDEN}"),
        ("give hf_" + "a" * 34 + " away", f"give {HIDDEN} away"),
        (f"id {AWS}", f"id {HIDDEN}"),
        ("-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----", HIDDEN),
        ("/home/ann/models/qwen", "qwen"),
        ("/home/ann/work/answer.py:answer", "answer.py:answer"),
        ("../../ann/rows.jsonl", "rows.jsonl"),
        ("~/rows.jsonl", "rows.jsonl"),
        ("file:///home/ann/rows.jsonl", "rows.jsonl"),
        ("ssh -i /home/ann/.ssh/id {host}", "ssh -i id {host}"),
        ("openai/gsm8k", "openai/gsm8k"),
        ("configs/data/rows.jsonl", "configs/data/rows.jsonl"),
        ("https://host/a/b", "https://host/a/b"),
        ("the key to 3/4 of it: 5", "the key to 3/4 of it: 5"),
    ],
)
def test_a_text_is_shown_without_what_is_private(text: str, shown: str) -> None:
    assert Redaction().text(text, "x") == shown


@pytest.mark.parametrize(
    "name", ["api_key", "HF_TOKEN", "dbPassword", "aws-secret-access-key", "Authorization", "stop_api_token", "token"]
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_name(name)


@pytest.mark.parametrize(
    "name", ["max_new_tokens", "monkey", "author", "tokenizer", "keyboard", "stop_token", "eosToken", "observation_key"]
)
def test_names_of_others(name: str) -> None:
    assert not is_secret_name(name)


def test_what_is_hidden_is_known_by_its_setting_and_small_numbers_stay() -> None:
    redaction = Redaction()

    shown = redaction.tree(
        {
            "env": {"api": {"token": "abc", "password": 12345678}, "token": 5, "on": True, "token_budget": 1 << 24},
            "flags": ["--api-key", "def", "--x"],
        }
    )

    assert shown == {
        "env": {"api": {"token": HIDDEN, "password": HIDDEN}, "token": 5, "on": True, "token_budget": 1 << 24},
        "flags": ["--api-key", HIDDEN, "--x"],
    }
    assert redaction.hidden == {"abc": "env.api.token", "12345678": "env.api.password", "def": "flags"}


def test_every_section_is_shown_or_left_out() -> None:
    assert sorted((*SHOWN, *LEFT_OUT)) == sorted(Settings.model_fields)


def test_what_says_nothing_of_a_machine_is_shown_as_it_is() -> None:
    settings = Settings().model_dump(mode="json")

    shown = shown_settings(settings)

    assert shown == {name: settings[name] for name in SHOWN}
    assert yaml.safe_load(yaml.safe_dump(shown)) == shown
