"""Harbor's task folders: read whole or refused, played in a box, scored when nobody works there any more."""

import os
import re
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from areal_async.api import Policy
from areal_async.config.settings import DatasetSettings, Settings, TaskSettings
from areal_async.data.recorded_rows import Used, refuse_other_rows
from areal_async.data.rows import load_rows
from areal_async.doctor.preflight.findings import Level
from areal_async.doctor.preflight.harbor import check_harbor
from areal_async.environments.environment import make_environment, tasks_of
from areal_async.environments.harbor import HarborEnvironment
from areal_async.environments.harbor_tasks import read_task, reward_of
from areal_async.errors import RewardError, UserError, WorkflowError
from areal_async.protocol.types import Prompt
from areal_async.sandbox import Box, sandbox
from areal_async.sandbox.keeper import KEEPERS
from tests.unit.environments.harbor_tasks import HALF, make_tasks
from workflows.terminal import terminal

pytestmark = pytest.mark.anyio

AGENT = '''
"""An agent by a script."""
from areal_async.sandbox import Box


async def scripted(prompt, policy, box: Box) -> None:
    await box.run({script!r})
'''


@pytest.fixture(scope="module")
def anyio_backend() -> object:
    return "asyncio", {"use_uvloop": True}


@pytest.fixture(scope="module")
async def warm() -> AsyncIterator[None]:
    async with sandbox():
        pass
    yield
    await KEEPERS.aclose()


class Recorder:
    """What of a policy an episode touches."""

    def __init__(self) -> None:
        self.info: dict[str, float] = {}


def prompts_of(environment: HarborEnvironment) -> list[Prompt]:
    rows = list(tasks_of(environment, what="harbor"))
    return [Prompt(epoch=0, index=place, row=row) for place, row in enumerate(rows)]


def made(folder: Path, tmp_path: Path, script: str = "true") -> HarborEnvironment:
    agent = tmp_path / "scripted.py"
    agent.write_text(AGENT.format(script=script))
    environment = make_environment(f"harbor:{folder}", {"agent": str(agent)})
    assert isinstance(environment, HarborEnvironment)
    return environment


async def rewards(environment: HarborEnvironment, num_tasks: int | None = None) -> list[Any]:
    policy = cast(Policy, Recorder())
    return [await environment.episode(prompt, policy) for prompt in prompts_of(environment)[:num_tasks]]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "there is no file"),
        ("def scripted(prompt, policy, box): pass", "without a coroutine scripted"),
        ("raise OSError('no')", "OSError: no"),
        ("def (", "SyntaxError"),
    ],
)
async def test_an_agent_that_is_none_is_told_before_a_run_and_before_any_episode(
    text: str | None, said: str, tmp_path: Path
) -> None:
    agent = tmp_path / "scripted.py"
    if text is not None:
        agent.write_text(text)
    environment = make_environment(f"harbor:{make_tasks(tmp_path / 'tasks')}", {"agent": str(agent)})

    with pytest.raises(UserError, match=said):
        list(environment.rows())
    with pytest.raises(UserError, match=said):
        async with environment.on_node():
            pytest.fail("it begins")


async def test_a_solution_scores_one_nothing_zero_and_half_a_solution_a_half(warm: None, tmp_path: Path) -> None:
    folder = make_tasks(tmp_path / "tasks")
    environment = made(folder, tmp_path, HALF)

    scores = [
        (await environment.score(task, is_solved=True), await environment.score(task, is_solved=False))
        for task in environment.tasks()
    ]
    assert scores == [(1.0, 0.0)] * 10
    assert await rewards(environment) == [0.5] * 10


FORGERIES = {
    "a reward beforehand": "mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; chmod 555 /logs/verifier",
    "a reward again and again": (
        "(trap '' TERM HUP; while :; do mkdir -p /logs/verifier; echo 1 > /logs/verifier/reward.txt; done) "
        ">/dev/null 2>&1 & disown -a"
    ),
    "tests of its own": "mkdir -p /tests; echo 'echo 1 > /logs/verifier/reward.txt' > /tests/test.sh; chmod 555 /tests",
    "a module among the tests": "mkdir /tests; echo 'loads = lambda text: {}' > /tests/json.py",
    "a folder that nothing is put in": "chmod 555 /",
    "a file for the folder of the reward": "rm -rf /logs; echo 1 > /logs",
    "no place to work": "rm -rf /app",
    "a bomb": ":(){ :|:& };:",
    "a bomb in the background": "(while :; do (while :; do sleep 1 & done) & done) >/dev/null 2>&1 & disown -a",
    "a full disk": "yes | head -c 1G > /workspace/large",
    "a full disk of empty files": 'python3 -c \'for n in range(10**5): open(f"/tmp/{n}", "w")\'',
    "tests elsewhere": "mkdir /mine; ln -s /mine /tests; ln -sfn /mine /logs/verifier",
    "another interpreter": "python3() { echo 1 > /logs/verifier/reward.txt; }; export -f python3; PATH=/app:$PATH",
    "what the interpreter loads": (
        "d=/workspace/.local/lib/python3.11/site-packages; mkdir -p $d; "
        "echo 'import json; json.loads = lambda text: {}' > $d/usercustomize.py"
    ),
    "what the shell loads": (
        "echo 'echo 1 > /logs/verifier/reward.txt; exit' > /workspace/.bashrc; export BASH_ENV=~/.bashrc"
    ),
}


@pytest.mark.parametrize("name", FORGERIES)
async def test_who_works_in_the_box_has_no_say_in_the_verdict(warm: None, tmp_path: Path, name: str) -> None:
    assert await rewards(made(make_tasks(tmp_path / "tasks", 1), tmp_path, FORGERIES[name])) == [0.0]


async def test_what_is_right_counts_however_full_the_disk_is(warm: None, tmp_path: Path) -> None:
    fill = f"{HALF}; yes | head -c 1G > large"
    assert await rewards(made(make_tasks(tmp_path / "tasks", 2), tmp_path, fill)) == [0.5, 0.5]


@pytest.mark.parametrize(
    ("tests", "told"),
    [
        ("true", "left 'nothing' as reward, need a number"),
        ("echo many > /logs/verifier/reward.txt; echo why", "left 'many"),
        ("echo nan > /logs/verifier/reward.txt", "left 'nan"),
        ('echo \'{"a": 1, "b": 2}\' > /logs/verifier/reward.json', "as reward, need a number"),
        ("mkfifo /logs/verifier/reward.txt", "left 'nothing'"),
        ("exit 3", "left 'nothing'"),
    ],
)
async def test_tests_without_a_reward_are_an_error_and_no_zero(
    warm: None, tmp_path: Path, tests: str, told: str
) -> None:
    folder = make_tasks(tmp_path / "tasks", 1)
    (folder / "sum-00/tests/test.sh").write_text(tests)
    with pytest.raises(RewardError, match=told):
        await rewards(made(folder, tmp_path))


async def test_tests_and_agents_have_the_deadlines_of_the_task(warm: None, tmp_path: Path) -> None:
    folder = make_tasks(tmp_path / "tasks", 1)
    path = folder / "sum-00/task.toml"
    path.write_text(path.read_text().replace("agent]\ntimeout_sec = 60.0", "agent]\ntimeout_sec = 2.0"))
    assert await rewards(made(folder, tmp_path, f"{HALF}; sleep 60")) == [0.5]

    path.write_text(path.read_text().replace("timeout_sec = 60.0", "timeout_sec = 0.001").replace("2.0", "0.001"))
    (folder / "sum-00/tests/test.sh").write_text("sleep 60")
    with pytest.raises(RewardError, match=r"out of time \(0\.001 s\)"):
        await rewards(made(folder, tmp_path))


async def test_a_task_that_changed_since_the_rows_were_read_is_not_played(warm: None, tmp_path: Path) -> None:
    folder = make_tasks(tmp_path / "tasks", 1)
    environment = made(folder, tmp_path)
    (prompt,) = prompts_of(environment)
    (folder / "sum-00/tests/expected.json").write_text("{}")
    with pytest.raises(WorkflowError, match="task sum-00 has another content than at the start of the run"):
        await environment.episode(prompt, cast(Policy, Recorder()))


@pytest.mark.parametrize("change", ["renamed", "changed", "made executable", "added", "left out"])
def test_a_run_does_not_go_on_with_other_tasks(tmp_path: Path, change: str) -> None:
    folder = make_tasks(tmp_path / "tasks", 3)
    source = DatasetSettings(environment=f"harbor:{folder}")

    def used() -> list[Used]:
        return [Used("tasks.0.dataset", source, load_rows(source, shows_progress=False))]

    refuse_other_rows(tmp_path / "rows.json", used(), run="mine")
    refuse_other_rows(tmp_path / "rows.json", used(), run="mine")
    match change:
        case "renamed":
            (folder / "sum-01").rename(folder / "sum-one")
        case "changed":
            (folder / "sum-01/environment/numbers.txt").write_text("1\n")
        case "made executable":
            (folder / "sum-01/tests/test.sh").chmod(0o755)
        case "added":
            make_tasks(folder, 4)
        case "left out":
            shutil.rmtree(folder / "sum-01")
    told = {
        "renamed": "task 1 was sum-01, is sum-02",
        "changed": "task 1, sum-01, has another content",
        "made executable": "task 1, sum-01, has another content",
        "added": "task 3 was none, is sum-03",
        "left out": "task 1 was sum-01, is sum-02",
    }[change]
    with pytest.raises(UserError, match=rf"that the run has recorded at its start \({told}\)"):
        refuse_other_rows(tmp_path / "rows.json", used(), run="mine")


@pytest.mark.parametrize(
    ("path", "content", "told"),
    [
        ("instruction.md", None, "task sum-00: got no instruction.md, need one"),
        ("task.toml", None, "task sum-00: got no task.toml, need one"),
        ("task.toml", "a = " + "[" * 5000, "task.toml: "),
        ("task.toml", "a = " + "9" * 5000, "task.toml: "),
        ("task.toml", "[solution.env]\nA = '" + "x" * 5000 + "'", "solution.env.A: got 'xxx"),
        ("task.toml", '[verifier.env]\nA = "\\u0000"', "verifier.env.A: got"),
        ("tests/test.sh", None, "got no tests/test.sh"),
        ("instruction.md", "x" * 300_000, "instruction.md: got 300,000 bytes, need at most 262,144"),
        ("task.toml", "[agent]\ntimeout_sec = 0", "agent.timeout_sec: got 0"),
        ("task.toml", "[agent]\ntimeout_sec = nan", "agent.timeout_sec: got nan"),
        ("task.toml", "[environment]\nmemory = 'much'", "environment.memory: got 'much'"),
        ("task.toml", "[verifier.env]\n'a b' = 'c'", "verifier.env"),
        ("task.toml", "= no", "task.toml: "),
        ("environment/Dockerfile", "FROM debian", "wants a container image"),
        ("task.toml", "[environment]\ndocker_image = 'debian'", "wants a container image"),
    ],
)
def test_a_task_that_cannot_be_is_refused_in_a_sentence(
    tmp_path: Path, path: str, content: str | None, told: str
) -> None:
    folder = make_tasks(tmp_path / "tasks", 1)
    if content is None:
        (folder / "sum-00" / path).unlink()
    else:
        (folder / "sum-00" / path).write_text(content)
    with pytest.raises(UserError) as refused:
        list(made(folder, tmp_path).rows())
    assert told in str(refused.value)


def test_links_and_too_much_are_refused(tmp_path: Path) -> None:
    folder = make_tasks(tmp_path / "tasks", 1) / "sum-00"
    for target in ("/etc", "/etc/passwd"):
        link = folder / "tests/link"
        link.symlink_to(target)
        with pytest.raises(UserError, match="got tests/link, which is no regular file"):
            read_task(folder, what="harbor")
        link.unlink()
    with (folder / "large").open("wb") as file:
        file.truncate(65 << 20)
    with pytest.raises(UserError, match="more than 2,000 files or 64 MiB"):
        read_task(folder, what="harbor")
    (folder / "large").unlink()
    os.mkfifo(folder / "tests/pipe")
    with pytest.raises(UserError, match="got tests/pipe, which is no regular file"):
        read_task(folder, what="harbor")
    with pytest.raises(UserError, match="without a task"):
        list(made(folder / "tests", tmp_path).rows())


def test_a_folder_is_a_task_by_its_own_name(tmp_path: Path) -> None:
    folder = make_tasks(tmp_path / "tasks", 1)
    (folder / "sum-00").rename(folder / "Ärger mit 'Namen' $HOME")
    (folder / "linked").symlink_to("Ärger mit 'Namen' $HOME")
    rows = {row["task_id"]: row["sha256"] for row in made(folder, tmp_path).rows()}
    assert rows.keys() == {"Ärger mit 'Namen' $HOME", "linked"}
    assert len(set(rows.values())) == 1

    for name, shown in (("two\nlines", r"'two\\nlines'"), (os.fsdecode(b"\xff"), r"'\\udcff'")):
        (folder / name).symlink_to("linked")
        with pytest.raises(UserError, match=f"task {shown}: got a name with characters that cannot be shown"):
            list(made(folder, tmp_path).rows())
        (folder / name).unlink()


async def test_files_of_any_name_come_into_the_box(warm: None, tmp_path: Path) -> None:
    folder = make_tasks(tmp_path / "tasks", 1)
    task = folder / "sum-00"
    for name in ("two\nlines", "$(exit 1) 'ü'", os.fsdecode(b"\xff")):
        (task / "environment" / name).write_text("1\n")
    (task / "tests/test.sh").write_text(
        "cat /app/*u* /app/$'\\xff' /app/$'two\\nlines' | wc -l > /logs/verifier/reward.txt\n"
    )
    (task / "environment/numbers.txt").unlink()
    (task / "environment/solver.py").unlink()
    assert await rewards(made(folder, tmp_path)) == [2.0]


async def test_files_that_do_not_fit_into_the_box_are_said(warm: None, tmp_path: Path) -> None:
    folder = make_tasks(tmp_path / "tasks", 1)
    path = folder / "sum-00/task.toml"
    path.write_text(path.read_text().replace("64M", "16M"))
    with (folder / "sum-00/environment/large").open("wb") as file:
        file.truncate(60 << 20)
    told = r"its box of 16 MiB cannot be given environment/large \(62,914,560 bytes\): File too large"
    with pytest.raises(WorkflowError, match=f"task sum-00: {told}"):
        await rewards(made(folder, tmp_path))
    (found,) = await check_harbor(Settings(tasks=[TaskSettings(workflow=f"harbor:{folder}")]))
    assert found.level is Level.ERROR
    assert re.search(told, found.saw)


def test_what_cannot_be_read_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tasks(tmp_path / "tasks", 1) / "sum-00"
    deep = folder / "environment"
    with monkeypatch.context() as place:
        for _ in range(20):  # below which no path leads
            place.chdir(deep)
            os.mkdir("d" * 250)
            deep = Path("d" * 250)
    with pytest.raises(UserError, match="task sum-00: .* cannot be read: File name too long"):
        read_task(folder, what="harbor")


@pytest.mark.parametrize(
    ("text", "table", "reward"),
    [
        (b"0.5\n", None, 0.5),
        (b"1", None, 1.0),
        (None, {"reward": 1, "b": 2}, 1.0),
        (None, {"only": 0.25}, 0.25),
        (b"1", {"reward": 0}, 0.0),
        (b"inf", None, None),
        (b"nan", None, None),
        (None, None, None),
        (None, {"reward": "high"}, None),
        (None, {"reward": [1]}, None),
        (None, {"a": 1, "b": 2}, None),
    ],
)
def test_a_reward_is_a_finite_number(text: bytes | None, table: dict[str, Any] | None, reward: float | None) -> None:
    assert reward_of(text, table) == reward


async def test_the_doctor_says_which_tasks_do_not_tell_a_solution_from_nothing(warm: None, tmp_path: Path) -> None:
    folder = make_tasks(tmp_path / "tasks", 3)
    settings = Settings(tasks=[TaskSettings(workflow=f"harbor:{folder}")])
    (found,) = await check_harbor(settings)
    assert (found.level, found.saw) == (Level.GOOD, "3 tasks: each solution scores 1, and nothing scores 0")

    (folder / "sum-00/solution/solve.sh").write_text("true")
    (folder / "sum-02/tests/test.sh").write_text("echo 1 > /logs/verifier/reward.txt")
    assert [(one.level, one.saw) for one in await check_harbor(settings)] == [
        (Level.ERROR, "task sum-00: its solution scores 0, need 1"),
        (Level.ERROR, "task sum-02: nothing scores 1, need 0"),
    ]

    shutil.rmtree(folder / "sum-00/solution")
    assert [(one.level, one.saw) for one in await check_harbor(settings)] == [
        (Level.ERROR, "task sum-02: nothing scores 1, need 0"),
        (Level.WARNING, "1 of 3 tasks have no solution/solve.sh (the first is sum-00)"),
    ]


class Talking:
    """A policy that has said beforehand what it calls."""

    def __init__(self, *commands: str) -> None:
        self.commands = commands
        self.told: list[str] = []

    async def act(self, messages: list[dict[str, Any]], tools: list[Any], **more: Any) -> None:
        (bash,) = tools
        self.asked = messages[0]["content"]
        self.told += [await bash(command) for command in self.commands]


async def test_the_agent_of_ours_is_told_what_a_terminal_shows(warm: None) -> None:
    policy = Talking("cd /tmp; pwd", "pwd; false", "true", "exit 3")
    prompt = Prompt(epoch=0, index=0, row={"instruction": "Do it."})
    async with sandbox() as box:
        await terminal(prompt, cast(Policy, policy), cast(Box, box))
    assert policy.asked.endswith("\n\nDo it.")
    assert policy.told == [
        "/tmp",
        "/tmp\nstatus: 1",
        "(no output)",
        "exit\nstatus: 3\nthe shell was started anew, its variables are gone",
    ]
