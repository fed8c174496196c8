"""A server process is started with the right command, says why it cannot, and never outlives its parent."""

import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import anyio
import httpx
import pytest
from structlog.testing import capture_logs

from areal_async.config.settings import InferenceSettings, ModelSettings, PolicySettings, Settings
from areal_async.errors import UserError
from areal_async.inference import servers
from areal_async.inference.admin_key import VARIABLE
from areal_async.inference.commands import (
    COMPILED,
    IMAGES,
    MAX_SERVERS_ON_CPU,
    OWN_PATH,
    ServerCommand,
    choose_backend,
    most_servers,
    server_command,
)
from areal_async.inference.faults import ServerFault
from areal_async.inference.http import ServerApi, make_client
from areal_async.inference.servers import ServerProcess
from areal_async.process.host import free_port
from areal_async.process.parent_death import guarded
from tests.fakes.fake_sglang import FakeSglang

FAKES = Path(__file__).parents[2] / "fakes"


def settings_of(**inference: object) -> Settings:
    return Settings(model=ModelSettings(path="m", dtype="float32"), inference=InferenceSettings(**inference))  # type: ignore[arg-type]


def test_embedded_engine_is_started_with_what_the_settings_say() -> None:
    command = server_command(
        settings_of(backend="embedded", context_length=512, num_threads=2), server_id="n0-1", index=1
    )

    line = " ".join(command.on_port(30000))
    assert line.startswith(f"{sys.executable} -m areal_async.inference.embedded --model-path m --host 127.0.0.1 ")
    for part in (
        "--weight-version 0-0", "--dtype float32", "--max-running-requests 256", "--stream-interval 8",
        "--context-length 512", "--device auto", "--num-threads 2", "--port 30000",
    ):  # fmt: skip
        assert part in line


@pytest.mark.parametrize(("given", "taken"), [(None, "1"), ("4", "4")])
def test_the_embedded_engine_has_one_heap_for_all_its_threads_or_as_many_as_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, given: str | None, taken: str
) -> None:
    monkeypatch.delenv("MALLOC_ARENA_MAX", raising=False)
    if given is not None:
        monkeypatch.setenv("MALLOC_ARENA_MAX", given)

    command = server_command(settings_of(backend="embedded"), server_id="n0-0", index=0)

    assert command.environment["MALLOC_ARENA_MAX"] == taken


def test_sglang_is_started_in_its_own_environment_with_incremental_output_and_the_users_flags(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    settings = settings_of(python=Path("/sgl/bin/python"), tensor_parallel=2, flags=("--mem-fraction-static", "0.7"))

    line = " ".join(server_command(settings, server_id="n0-0", index=0).on_port(1))

    assert line.startswith("/sgl/bin/python -m sglang.launch_server --model-path m ")
    assert "--incremental-streaming-output --tp-size 2 --mem-fraction-static 0.7 --port 1" in line
    assert "--num-threads" not in line


def test_sglang_is_told_that_there_is_no_gpu_and_the_users_flags_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    settings = settings_of(python=Path("/sgl/bin/python"), num_threads=2, flags=("--max-total-tokens", "1024"))

    command = server_command(settings, server_id="n0-0", index=0)

    line = " ".join(command.on_port(1))
    assert "--device cpu --attention-backend torch_native" in line
    assert line.index("--max-total-tokens 65536") < line.index("--max-total-tokens 1024")
    assert command.environment == {"OMP_NUM_THREADS": "2", "TORCH_COMPILE_DISABLE": "1", **IMAGES, **OWN_PATH}
    compiled = settings_of(python=Path("/sgl/bin/python"), flags=(COMPILED,))
    assert "TORCH_COMPILE_DISABLE" not in server_command(compiled, server_id="n0-0", index=0).environment
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert "--device" not in server_command(settings, server_id="n0-0", index=0).arguments


def test_servers_do_not_sample_alike() -> None:
    commands = [
        server_command(settings_of(backend="embedded"), server_id=f"n0-{index}", index=index) for index in (0, 1)
    ]

    seeds = {command.arguments[command.arguments.index("--random-seed") + 1] for command in commands}

    assert len(seeds) == 2


def test_each_server_gets_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    settings = settings_of(backend="embedded", tensor_parallel=2)

    shares = [server_command(settings, server_id="x", index=index).environment for index in (0, 1, 2)]

    assert [share["CUDA_VISIBLE_DEVICES"] for share in shares] == ["4,5", "6,7", "4,5"]
    after_three = server_command(settings_of(backend="embedded"), server_id="x", index=0, first_gpu=3)
    assert after_three.environment["CUDA_VISIBLE_DEVICES"] == "7", "a second fleet begins behind the first"


def test_servers_that_are_added_take_the_gpus_that_frozen_policies_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,4,5,6,7")
    judge = {"judge": PolicySettings(path="org/judge", num_servers=2)}
    settings = settings_of(backend="embedded").model_copy(update={"policies": judge})

    shares = [server_command(settings, server_id="x", index=index).environment for index in range(3)]

    assert [share["CUDA_VISIBLE_DEVICES"] for share in shares] == ["3", "6", "7"]
    assert most_servers(settings) == 3
    assert most_servers(settings_of(tensor_parallel=2)) == 2
    assert most_servers(settings_of(colocate="release")) == 1, "the trainer has the others in turns"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert most_servers(settings) == MAX_SERVERS_ON_CPU


def test_auto_takes_the_embedded_engine_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    assert choose_backend(settings_of().inference) == "embedded"
    assert choose_backend(settings_of(python=Path("/sgl/bin/python")).inference) == "sglang"


def fake_command(*flags: str, model_path: str = "/") -> ServerCommand:
    arguments = (sys.executable, "-m", "sglang.launch_server", "--model-path", model_path, "--weight-version", "0-0")
    return ServerCommand("n0-0", (*arguments, *flags), {"PYTHONPATH": f"{FAKES}:{FAKES.parents[1]}"})


def test_each_embedded_server_has_a_secret_of_its_own_which_no_command_line_shows() -> None:
    first, second = (
        server_command(settings_of(backend="embedded"), server_id=f"n0-{index}", index=index) for index in (0, 1)
    )

    assert len(first.admin_key) >= 32
    assert first.admin_key != second.admin_key
    assert first.admin_key not in " ".join(first.on_port(1)) + repr(first)
    assert first.environment[VARIABLE] == first.admin_key


@pytest.mark.parametrize("flags", [("--admin-api-key", "k1"), ("--admin-api-key=k0", "--admin-api-key=k1")])
def test_sglang_has_the_secret_that_its_flags_give_it(flags: tuple[str, ...]) -> None:
    without, given = (
        server_command(settings_of(backend="sglang", flags=words), server_id="n0-0", index=0) for words in ((), flags)
    )

    assert (without.admin_key, given.admin_key) == ("", "k1")
    assert VARIABLE not in without.environment


@pytest.mark.anyio
async def test_started_server_gets_its_secret_and_so_does_who_administrates_it(tmp_path: Path) -> None:
    fake = fake_command()
    command = replace(fake, environment={**fake.environment, VARIABLE: "secret"}, admin_key="secret")
    process = ServerProcess(command, log_path=tmp_path / "server.log")
    async with make_client(max_connections=2) as http:
        api = ServerApi(http, "")
        await process.start(api, silence_s=100, bound_s=100)
        try:
            environment = environment_at(process.port)
        finally:
            await process.stop()

    assert api.admin_key == "secret"
    assert f"{VARIABLE}=secret".encode() in environment.split(b"\0")


def environment_at(port: int) -> bytes:
    """Return the environment of the process with this port on its command line."""
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if str(port).encode() in (place / "cmdline").read_bytes().split(b"\0"):
                return (place / "environ").read_bytes()
    raise AssertionError(f"nobody serves at {port}")


def named_command() -> ServerCommand:
    fake = fake_command("--served-model-name", "ours-1")
    return replace(fake, name="ours-1", admin_key="secret")


@pytest.mark.parametrize("backend", ["embedded", "sglang"])
def test_each_server_has_a_name_of_its_own_unless_its_flags_give_it_one(backend: str) -> None:
    flags = ("--served-model-name", "theirs")
    first, second, given = (
        server_command(settings_of(backend=backend, flags=words), server_id="n0-0", index=0)
        for words in ((), (), flags)
    )

    assert first.name != second.name
    assert f"--served-model-name {first.name} " in " ".join(first.on_port(1))
    assert (given.name, given.arguments[-2:]) == ("theirs", flags)


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("name", "says"), [("ours-2", "it says that it serves 'ours-2'"), (None, "it does not say what it serves")]
)
async def test_a_strangers_server_at_the_port_is_not_admitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str | None, says: str
) -> None:
    """It is as healthy as ours would be; another of this package, or of another make."""
    async with FakeSglang(name=name or "") as stranger, make_client(max_connections=2) as http:
        if name is None:
            stranger.failing["/model_info"] = (404, {})
        taken = int(stranger.url.rpartition(":")[2])
        ports = [taken, free_port()]
        monkeypatch.setattr(servers, "free_port", lambda **_: ports.pop(0))
        process, api = ServerProcess(named_command(), log_path=tmp_path / "server.log"), ServerApi(http, "")
        with capture_logs() as entries:
            await process.start(api, silence_s=100, bound_s=100)
        await process.stop()

        assert api.url != stranger.url
        said = [entry["reason"] for entry in entries if entry["event"] == "server.not_ours"]
        assert said == [f"a server that is not ours answers at port {taken}: {says}"]

        monkeypatch.setattr(servers, "free_port", lambda **_: taken)
        with pytest.raises(UserError, match=f"no free port in 5 tries: {re.escape(said[0])}$"):
            await process.start(api, silence_s=100, bound_s=100)
        await process.stop()
    assert {route for route, _ in stranger.calls} <= {"/health", "/model_info"}, "it was only looked at"
    assert set(stranger.authorizations) == {""}, "and was told no secret"


@pytest.mark.anyio
async def test_started_server_answers_and_is_gone_after_stop(tmp_path: Path) -> None:
    process = ServerProcess(fake_command(), log_path=tmp_path / "logs" / "server.log")
    async with make_client(max_connections=2) as http:
        api = ServerApi(http, "")
        await process.start(api, silence_s=100, bound_s=100)
        assert await api.weight_version(deadline_s=60) == "0-0"
        await process.stop()
        assert not await api.is_healthy(deadline_s=60)


@pytest.mark.anyio
async def test_a_server_that_is_given_up_while_its_process_is_made_is_ended_too(tmp_path: Path) -> None:
    process = ServerProcess(fake_command(), log_path=tmp_path / "server.log")
    async with make_client(max_connections=2) as http:
        with anyio.CancelScope() as given_up:
            given_up.cancel()
            await process.start(ServerApi(http, ""), silence_s=100, bound_s=100)
    pid = process._pid
    await process.stop()

    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def start_in_vain(command: ServerCommand, directory: Path) -> Exception:
    """Return why a server did not start."""
    process = ServerProcess(command, log_path=directory / "server.log")
    async with make_client(max_connections=2) as http:
        with pytest.raises((UserError, ServerFault)) as raised:
            await process.start(ServerApi(http, ""), silence_s=100, bound_s=100)
        await process.stop()
    return raised.value


def python_command(script: str) -> ServerCommand:
    return ServerCommand("n0-0", (sys.executable, "-c", script), {})


@pytest.mark.anyio
async def test_server_that_ends_while_starting_is_quoted(tmp_path: Path) -> None:
    error = await start_in_vain(fake_command(model_path="nowhere"), tmp_path)

    assert isinstance(error, UserError)
    assert "ended with status 1 while starting: model path nowhere is no folder; its log" in str(error)


@pytest.mark.anyio
async def test_server_that_is_killed_while_starting_is_no_mistake_of_the_users(tmp_path: Path) -> None:
    script = "import os; print('loading', flush=True); os.kill(os.getpid(), 9)"

    error = await start_in_vain(python_command(script), tmp_path)

    assert isinstance(error, ServerFault)
    assert "killed by signal 9 while starting: loading" in str(error)


@pytest.mark.anyio
async def test_cause_before_the_last_line_is_quoted_too(tmp_path: Path) -> None:
    script = "import sys; sys.exit('ValueError: no such weights\\nsignal from a child process\\nending')"

    error = await start_in_vain(python_command(script), tmp_path)

    assert isinstance(error, UserError)
    assert "starting: ValueError: no such weights | signal from a child process | ending; its log" in str(error)


class Start:
    """A server that writes what it is told to, and a clock that goes on by ten seconds with each look."""

    def __init__(self, directory: Path) -> None:
        self.orders = directory / "orders"
        os.mkfifo(self.orders)
        script = (
            f"for line in open({str(self.orders)!r}): print(line, end='', flush=True)\nimport time; time.sleep(600)"
        )
        self.process = ServerProcess(
            python_command(script), log_path=directory / "server.log", clock=lambda: 10.0 * self.num_looks
        )
        self.num_looks = 0

    async def go(self, *, num_lines: int, num_looks: int, bound_s: float) -> None:
        """Start it. Before each look it writes a line, while there are any, and is healthy at the last of the looks."""
        lines = iter(range(num_lines))

        def look(request: httpx.Request) -> httpx.Response:
            self.num_looks += 1
            if self.num_looks == 1:
                self.pen = self.orders.open("w")
            if (line := next(lines, None)) is not None:
                self.pen.write(f"shard {line}\n")
                self.pen.flush()
                while f"shard {line}\n" not in self.process.log_path.read_text():
                    os.sched_yield()
            return httpx.Response(200 if self.num_looks == num_looks else 503)

        async with httpx.AsyncClient(transport=httpx.MockTransport(look)) as http:
            try:
                await self.process.start(ServerApi(http, ""), silence_s=25, bound_s=bound_s)
            finally:
                await self.process.stop()
                self.pen.close()


@pytest.mark.anyio
async def test_server_may_take_long_to_start_while_its_log_grows(tmp_path: Path) -> None:
    start = Start(tmp_path)

    await start.go(num_lines=9, num_looks=11, bound_s=1000)

    assert start.num_looks == 11


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("num_lines", "bound_s", "told"),
    [
        (
            2,
            1000,
            "not healthy, and without a sign of life in its log for 25 s, its last words: shard 0 | shard 1; its",
        ),
        (99, 50, "not healthy within 50 s, its last words: shard 1 | shard 2 | shard 3 | shard 4 | shard 5; its log"),
    ],
)
async def test_server_that_falls_silent_or_talks_for_ever_is_quoted(
    tmp_path: Path, num_lines: int, bound_s: float, told: str
) -> None:
    with pytest.raises(UserError, match=re.escape(told)):
        await Start(tmp_path).go(num_lines=num_lines, num_looks=99, bound_s=bound_s)


def test_guarded_process_dies_when_its_parent_is_killed() -> None:
    script = (
        "import subprocess, sys\n"
        "from areal_async.process.parent_death import guarded\n"
        "child = 'import time; print(1, flush=True); time.sleep(600)'\n"
        "subprocess.run(guarded([sys.executable, '-c', child]))\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "1\n"

        os.kill(parent.pid, signal.SIGKILL)

        assert parent.stdout.read() == "", "the pipe ends only when the child is gone too"


def test_guarded_command_becomes_the_command() -> None:
    done = subprocess.run(guarded([sys.executable, "-c", "print('here')"]), capture_output=True, text=True, check=True)

    assert done.stdout == "here\n"


@pytest.mark.anyio
@pytest.mark.parametrize(("keeps", "told"), [(True, r"\x1b[31mthe cause\x07"), (False, "it wrote nothing")])
async def test_last_words_are_plain_and_may_be_gone(tmp_path: Path, keeps: bool, told: str) -> None:
    remove = "" if keeps else f"import os; os.remove({str(tmp_path / 'server.log')!r}); "

    error = await start_in_vain(python_command(f"{remove}import sys; sys.exit('\\x1b[31mthe cause\\x07')"), tmp_path)

    assert isinstance(error, UserError)
    assert f"ended with status 1 while starting: {told}; its log" in str(error)
