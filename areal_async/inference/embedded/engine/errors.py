"""What can go wrong in the embedded engine, by who has to act.

::

    UserError           (the library's) the command line names something unusable: status 2 and a sentence
    RequestError        the client asked for something impossible: 400 in SGLang's JSON
      SchemaError       the body is not what the route takes: 400 in the shape of a validation error
    WeightsError        weights cannot be received or loaded: 400, and those that are served stay
"""

from collections.abc import Iterator
from contextlib import contextmanager

from areal_async.errors import UserError


class RequestError(Exception):
    """A request that cannot be served."""


class SchemaError(RequestError):
    """A body that is not JSON or not of the route's shape."""


class WeightsError(Exception):
    """Weights that are missing, torn or of another model, or an order about them that does not fit."""


@contextmanager
def in_one_sentence(what: str) -> Iterator[None]:
    """Turn whatever the libraries raise for a bad folder into the sentence that matters to who typed the command.

    Raises:
        UserError: ``what``, and why it cannot be used.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as exc:  # transformers, torch and safetensors raise almost anything for a folder they cannot read
        raise UserError(f"{what}: {type(exc).__name__}: {' '.join(str(exc).split())}") from exc
