"""A server that was started with a secret is administrated with it alone; who has none may generate and look.

One contract for the embedded engine and the real SGLang, whose ``--admin-api-key`` it is.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_async.inference.admin_key import VARIABLE
from tests.sglang.conftest import SglangServer, find_sglang
from tests.unit.inference.embedded_engine import Server, command, prompt_of

NAME = "areal_async-0123456789abcdef"
SECRET = "oNlYtHeNoDeKnOwS_-0123456789"
ORDERS: dict[str, dict[str, Any]] = {
    "/pause_generation": {"mode": "abort"},
    "/continue_generation": {},
    "/update_weights_from_disk": {"model_path": "/nowhere"},
    "/init_weights_update_group": {
        "master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2, "backend": "gloo",
    },
    "/destroy_weights_update_group": {},
    "/begin_weight_update": {},
    "/update_weights_from_distributed": {"names": [], "dtypes": [], "shapes": []},
    "/end_weight_update": {},
    "/abort_request": {"abort_all": True},
    "/flush_cache": {},
    "/release_memory_occupation": {"tags": ["kv_cache"]},
    "/resume_memory_occupation": {"tags": ["kv_cache"]},
    "/weights_checker": {"action": "checksum"},
}  # fmt: skip


class LockedEngine(Server):
    """The embedded engine with a secret, handed over as a node does it."""

    def start(self, model_path: Path, port: int, *flags: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(command(model_path, port, *flags), env={**os.environ, VARIABLE: SECRET})


@pytest.fixture(scope="module", params=["embedded", pytest.param("sglang", marks=pytest.mark.sglang)])
def locked(request: pytest.FixtureRequest, models: list[Path]) -> Iterator[Server]:
    if request.param == "embedded":
        server: Server = LockedEngine(models[0], "--served-model-name", NAME)
    else:
        find_sglang()
        server = SglangServer(models[0], "--admin-api-key", SECRET, "--served-model-name", NAME)
    yield server
    server.close()


@pytest.mark.parametrize("route", ORDERS)
@pytest.mark.parametrize("sent", ["", f"Bearer {SECRET}x", "Bearer", f"Basic {SECRET}", SECRET])
def test_an_order_without_the_secret_is_refused_and_changes_nothing(locked: Server, route: str, sent: str) -> None:
    answer = locked.http.post(route, json=ORDERS[route], headers={"authorization": sent} if sent else {})

    assert (answer.status_code, answer.json()) == (401, {"error": "Unauthorized"})
    assert locked.http.get("/model_info").json()["weight_version"] == "0-0"
    assert locked.generate(prompt_of(4), max_new_tokens=2)["meta_info"]["finish_reason"]["type"] == "length"


def test_a_server_tells_everybody_by_which_name_its_node_knows_it(locked: Server) -> None:
    assert locked.http.get("/model_info").json()["served_model_name"] == NAME


@pytest.mark.parametrize("route", ["/health", "/model_info", "/server_info", "/v1/loads"])
def test_looking_needs_no_secret(locked: Server, route: str) -> None:
    assert locked.http.get(route).status_code == 200


def test_who_sends_the_secret_is_obeyed(locked: Server, models: list[Path]) -> None:
    headers = {"authorization": f"Bearer {SECRET}"}
    update = {"model_path": str(models[1]), "weight_version": "0-1"}

    answers = [
        locked.http.post(route, json=body, headers=headers)
        for route, body in (
            ("/pause_generation", {"mode": "retract"}),
            ("/update_weights_from_disk", update),
            ("/continue_generation", {}),
        )
    ]
    version = locked.http.get("/model_info").json()["weight_version"]
    back = locked.http.post(
        "/update_weights_from_disk",
        json={**update, "model_path": str(models[0])} | {"weight_version": "0-0"},
        headers=headers,
    )

    assert [answer.status_code for answer in (*answers, back)] == [200] * 4
    assert version == "0-1"


def test_the_engine_tells_nobody_its_secret(models: list[Path]) -> None:
    server = LockedEngine(models[0])
    try:
        said = server.http.get("/server_info").text + server.http.get("/model_info").text
        words = Path(f"/proc/{server.process.pid}/cmdline").read_text()
        odd = server.http.post("/flush_cache", headers={b"authorization": b"Bearer \xe9\xff"})
    finally:
        server.close()

    assert SECRET not in said + words
    assert odd.status_code == 401
