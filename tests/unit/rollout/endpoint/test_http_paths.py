"""A path is an API's, with a version before it, with several, and with none."""

import pytest

from areal_async.rollout.endpoint.http import without_version


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/models", "models"),
        ("models/", "models"),
        ("//v1/v1/models/v1/x", "models/v1/x"),
        ("/v1", "v1"),
        ("/v1/", ""),
        ("", ""),
        ("/" + "v1/" * 1000 + "models", "models"),
    ],
)
def test_a_version_before_a_path_is_left_out(path: str, meant: str) -> None:
    assert without_version(path) == meant
