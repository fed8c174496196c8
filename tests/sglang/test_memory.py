"""A paused server gives the memory of its cache back, and goes on with what it had under way: both servers alike.

On a CPU the real SGLang has nothing to give back; the routes, their answers and their order are what is held here.
"""

from pathlib import Path

import pytest

from tests.unit.inference.embedded_engine import Server, prompt_of

pytestmark = pytest.mark.timeout(900)  # of which the server's start takes most, once

CACHE = {"tags": ["kv_cache"]}
LONG = 450


def test_what_is_under_way_goes_on_after_the_memory_was_released_and_resumed(server: Server) -> None:
    prompt = prompt_of(20, seed=7)
    whole = server.generate(prompt, max_new_tokens=LONG, temperature=0)
    with server.stream(prompt, max_new_tokens=LONG, temperature=0) as stream:
        stream.read(2)
        assert server.post("/pause_generation", mode="retract").status_code == 200
        released = server.post("/release_memory_occupation", **CACHE)
        resumed = server.post("/resume_memory_occupation", **CACHE)
        assert server.post("/continue_generation").status_code == 200
        stream.read()

    assert [(answer.status_code, answer.json()) for answer in (released, resumed)] == [(200, None)] * 2
    assert stream.output_ids == whole["output_ids"]
    assert stream.meta["num_retractions"] == 1


def test_a_request_that_comes_while_the_memory_is_released_waits_and_is_answered_afterwards(server: Server) -> None:
    server.wait_idle()
    server.post("/pause_generation", mode="retract")
    server.post("/release_memory_occupation", **CACHE)
    with server.stream(prompt_of(4), max_new_tokens=3) as stream:
        server.post("/resume_memory_occupation", **CACHE)
        server.post("/continue_generation")
        stream.read()

    assert len(stream.output_ids) == 3


def test_weights_may_change_while_the_memory_is_released(server: Server, models: list[Path]) -> None:
    server.wait_idle()
    server.post("/pause_generation", mode="retract")
    server.post("/release_memory_occupation", **CACHE)

    answer = server.post("/update_weights_from_disk", model_path=str(models[1]), weight_version="0-1")

    server.post("/resume_memory_occupation", **CACHE)
    server.post("/continue_generation")
    assert answer.json()["success"], answer.text
    assert server.generate(prompt_of(4), max_new_tokens=2)["meta_info"]["weight_version"] == "0-1"


def test_the_engine_refuses_what_would_end_sglang(embedded_server: Server) -> None:
    """It asserts that nothing runs, and that what is resumed was released."""
    server = embedded_server
    unreleased = server.post("/resume_memory_occupation", **CACHE)
    weights = server.post("/release_memory_occupation", tags=["weights"])
    odd = server.post("/release_memory_occupation", tags=["everything"])
    with server.stream(prompt_of(8), max_new_tokens=LONG) as stream:
        stream.read(1)
        busy = server.post("/release_memory_occupation", **CACHE)
        stream.read()

    assert [answer.status_code for answer in (unreleased, weights, odd, busy)] == [400] * 4
    assert "idle" in busy.json()["message"]
    assert len(stream.output_ids) == LONG, "a refused order changed nothing"


def test_an_idle_engine_without_its_memory_is_healthy(embedded_server: Server) -> None:
    server = embedded_server
    server.wait_idle()
    server.post("/release_memory_occupation")
    healthy = [server.http.get(route).status_code for route in ("/health", "/health_generate")]
    server.post("/resume_memory_occupation")

    assert healthy == [200, 200]
    assert len(server.generate(prompt_of(4), max_new_tokens=3)["output_ids"]) == 3
