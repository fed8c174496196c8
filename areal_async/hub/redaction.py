"""Settings as others may read them: without secrets, and without what they say of this machine. Pure.

Hidden are texts, and long whole numbers, whose name says that they are secret, passwords and keys of URLs and options,
and what has the form of a well-known kind of key. Of a path that leads out of the working directory its last name is
left, for the others are of people and machines.
"""

import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

HIDDEN = "<hidden>"
SECRET_WORDS = frozenset(
    "key keys apikey token secret secrets password passwords passwd pwd passphrase credential credentials auth "
    "authorization bearer cookie cookies signature".split()
)
OF_TEXTS = frozenset(
    "stop eos bos pad unk mask sep cls begin end start image special "
    "observation action question answer prompt text label field column row sort".split()
)
"""Words before ``token``, ``key`` or ``keys`` that make it a part of a text, or of a row."""
LEAST_SECRET_NUMBER = 10_000_000
"""A smaller number is a setting, whatever it is called; and ``token_budget`` ends in another word."""
SHOWN = (
    "run", "tasks", "env", "eval", "model", "rollout", "policies", "arms", "inference", "algorithm", "trainer",
    "health", "gate",
)  # fmt: skip
"""Sections that say what was trained on what, and how."""
LEFT_OUT = ("endpoint", "metrics", "launch", "serve", "bus")
"""Sections that speak of hosts, addresses and files alone."""

_WORD_EDGE = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z0-9]+")
_IN_URL = re.compile(r"(?P<before>\b[A-Za-z][A-Za-z0-9+.-]*://)(?P<secret>[^/\s?#]+)(?=@)")
_NAME = r"(?P<name>[A-Za-z][\w.-]*)"
_QUOTE = r"(?P<quote>\\?['\"])?"
_NAMED = (
    (re.compile(r"[?&;](?P<name>[^=&;\s]+)=(?P<quote>(?!))?"), r"[^&;#\s]+"),
    (re.compile(rf"(?<!\S)--?{_NAME}(?:=|\s+){_QUOTE}"), r"[^\s'\"]+"),
    (re.compile(rf"\b{_NAME}(?:\\?['\"])?\s*[=:]\s*{_QUOTE}(?:(?i:bearer|basic)\s+)?"), r"[^\s'\"]+"),
)
"""What names a value in a text, up to where that begins, and what it is where it has no quotes: in the query of a URL,
after an option, assigned."""
_OPTION = re.compile(r"--?[A-Za-z][\w.-]*")
_SHAPES = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}|\bsk-[\w-]{20,}|\bgh[oprsu]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{20,}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bxox[abprs]-[\w-]{10,}|\beyJ[\w-]{10,}\.[\w-]+\.[\w-]*|\bS[UAOCN][A-Z2-7]{56}\b"
    r"|(?i:(?<=\bbearer )|(?<=\bbasic ))[\w.~+/-]{8,}=*"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    re.DOTALL,
)
_PATH = re.compile(r"(?<![\w/.~])(?:~[\w.-]*|\.\.|file://)?/(?!/)(?:[^\s/:'\"]+/)*(?P<name>[^\s/:'\"]+)/?")


def is_secret_name(name: str) -> bool:
    """Say whether what has this name is likely a secret: ``api_key``, ``HF_TOKEN``, ``dbPassword``."""
    words = _WORD_EDGE.sub(" ", name).lower().split()
    return any(
        word in SECRET_WORDS and not (word in ("token", "key", "keys") and before in OF_TEXTS)
        for before, word in zip(["", *words], words, strict=False)
    )


class Redaction:
    """One reading of settings, or of any tree of values."""

    def __init__(self) -> None:
        self.hidden: dict[str, str] = {}
        """What was hidden -> the name of the value that had it."""

    def tree(self, value: Any, name: str = "") -> Any:
        """Return a value without what is secret, and mappings and lists without what is secret in them."""
        if isinstance(value, Mapping):
            return {key: self.tree(one, f"{name}.{key}" if name else str(key)) for key, one in value.items()}
        if isinstance(value, list | tuple):
            before = ["", *value]
            return [
                self._hide(one, name) if _is_of_secret_option(last, one) else self.tree(one, name)
                for last, one in zip(before, value, strict=False)
            ]
        if isinstance(value, int) and value >= LEAST_SECRET_NUMBER and is_secret_name(_last_word(name)):
            return self._hide(str(value), name)
        if not isinstance(value, str) or not value:
            return value
        if any(map(is_secret_name, name.split("."))):
            return self._hide(value, name)
        return self.text(value, name)

    def text(self, text: str, name: str) -> str:
        """Return a text without the secrets and the folders in it."""
        text = _IN_URL.sub(lambda found: found["before"] + self._hide(_password(found["secret"]), name), text)
        for naming, unquoted in _NAMED:
            text = self._without_named(naming, unquoted, text, name)
        text = _SHAPES.sub(lambda found: self._hide(found[0], name), text)
        return _PATH.sub(lambda found: found["name"], text)

    def _without_named(self, naming: re.Pattern[str], unquoted: str, text: str, name: str) -> str:
        """Hide what is named as secrets are; what else has a name may have more of them in it."""
        parts, position = [], 0
        while found := naming.search(text, position):
            parts.append(text[position : found.end()])
            position = found.end()
            if text.startswith(HIDDEN, position) or not is_secret_name(found["name"]):
                continue
            value = rf"(?s:(?!{re.escape(found['quote'])})(?:\\.|.))+" if found["quote"] else unquoted
            if secret := re.compile(value).match(text, position):
                parts.append(self._hide(secret[0], name))
                position = secret.end()
        return "".join([*parts, text[position:]])

    def _hide(self, secret: str, name: str) -> str:
        if secret != HIDDEN:
            self.hidden.setdefault(secret, name)
        return HIDDEN


def shown_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sections that others may read, without what they may not."""
    redacted: dict[str, Any] = Redaction().tree({name: settings[name] for name in SHOWN if name in settings})
    return redacted


def _last_word(name: str) -> str:
    return _WORD_EDGE.sub(" ", name).rpartition(" ")[2]


def _password(user: str) -> str:
    """Return what is secret of a URL's ``user:password``, or of its token."""
    return unquote(user.partition(":")[2] or user)


def _is_of_secret_option(before: Any, value: Any) -> bool:
    """Say whether a word is the value of the option before it, whose name says that it is secret."""
    is_option = isinstance(before, str) and _OPTION.fullmatch(before) is not None
    return is_option and is_secret_name(before) and isinstance(value, str) and not value.startswith("--")
