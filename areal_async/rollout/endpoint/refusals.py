"""Requests that are not answered: why, and how each API says so. Pure."""

from typing import Any, Literal, NamedTuple

from areal_async.errors import ArealError

RefusalKind = Literal[
    "bad_request", "unauthorized", "not_found", "not_allowed", "too_large", "too_long", "too_slow", "busy",
    "unavailable", "internal",
]  # fmt: skip
_WORDS: dict[RefusalKind, tuple[int, str | None, str]] = {
    "bad_request": (400, None, "invalid_request_error"),
    "too_long": (400, "context_length_exceeded", "invalid_request_error"),
    "unauthorized": (401, "invalid_api_key", "authentication_error"),
    "not_found": (404, "unknown_url", "not_found_error"),
    "not_allowed": (405, "method_not_supported", "invalid_request_error"),
    "too_slow": (408, "request_timeout", "timeout_error"),
    "too_large": (413, "request_too_large", "request_too_large"),
    "busy": (429, "rate_limit_exceeded", "rate_limit_error"),
    "internal": (500, "internal_error", "api_error"),
    "unavailable": (503, "service_unavailable", "overloaded_error"),
}
"""Kind -> HTTP's status, OpenAI's code for it, and Anthropic's type of error."""
_ANTHROPIC_OVERLOADED = 529
"""Status of an ``overloaded_error``, of Anthropic's own making."""


class Refusal(ArealError):
    """A request that is answered with an error of its API."""

    def __init__(self, kind: RefusalKind, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.kind: RefusalKind = kind
        self.message = message
        self.param = param
        """The field at fault, where one is."""
        self.code = code
        """The API's own word for this error, where it has one."""


class Unexpected(Refusal):
    """A mistake of ours, found while a request was answered."""

    def __init__(self, message: str) -> None:
        super().__init__("internal", message)


class ErrorAnswer(NamedTuple):
    """A refusal in the words of one API."""

    status: int
    """The status of HTTP."""
    body: dict[str, Any]


def refuse_if(is_wrong: bool, param: str, message: str) -> None:
    """Refuse a request for one of its fields.

    Raises:
        Refusal: it is wrong.
    """
    if is_wrong:
        raise Refusal("bad_request", f"{param}: {message}", param=param, code="invalid_value")


def openai_error(refusal: Refusal) -> ErrorAnswer:
    """Return what both of OpenAI's APIs answer to a request that is refused."""
    status, code, _ = _WORDS[refusal.kind]
    kind = "server_error" if status >= 500 else "invalid_request_error"
    kind = "rate_limit_error" if refusal.kind == "busy" else kind
    error = {"message": refusal.message, "type": kind, "param": refusal.param, "code": refusal.code or code}
    return ErrorAnswer(status, {"error": error})


def anthropic_error(refusal: Refusal) -> ErrorAnswer:
    """Return what Anthropic's Messages answers to a request that is refused."""
    status, _, kind = _WORDS[refusal.kind]
    body = {"type": "error", "error": {"type": kind, "message": refusal.message}, "request_id": None}
    return ErrorAnswer(_ANTHROPIC_OVERLOADED if refusal.kind == "unavailable" else status, body)
