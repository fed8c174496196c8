"""The files of a project that are the same for every workflow, or nearly so."""

from collections.abc import Sequence

KINDS = {
    "workflow.py": "the workflow: what the model is asked, and what its answer is worth",
    "rewards/": "how an answer is scored; yours now, to be changed or replaced",
    "data/": "rows to train on, and others that are held out",
    "models/": "a model of a megabyte or two",
    "configs/": "settings: `workflow_cpu.yaml` where there is no GPU, `workflow.yaml` for a larger model that SGLang "
    "serves (not run on a GPU yet)",
    "test_workflow.py": "has the workflow answer eight rows",
}
"""What is in a project, in the order in which it is shown."""

GITIGNORE = "runs/\n__pycache__/\n.venv/\n"

TEST = '''"""The workflow answers held-out rows as in a run: with a model, by the code of a node, without a trainer."""

import areal_async


def test_the_workflow_scores_every_row() -> None:
    (scores,) = areal_async.evaluate("workflow.py", config="configs/workflow_cpu.yaml", limit=8)

    assert scores.num_failed == 0, scores.reasons
    assert scores.num_scored == 8
'''

_PYPROJECT = """[tool.mypy]
strict = true
explicit_package_bases = true
exclude = ["^runs/", "^\\\\.venv/"]
"""

_OVERRIDES = """
[[tool.mypy.overrides]]  # they bring no types
module = [{modules}]
ignore_missing_imports = true
"""

_PYTEST = """
[tool.pytest.ini_options]
pythonpath = ["."]
"""

_README = """# {name}

{sentence}.

```console
$ areal-async try workflow.py --n 4     # four answers to one row, token by token; nothing is trained
$ areal-async doctor workflow.py        # what a run would meet on this machine
$ areal-async run workflow.py           # train; minutes on a laptop's CPU, with the model in models/
$ areal-async eval --run {name}_cpu     # the trained model on held-out rows
$ areal-async status --run {name}_cpu --html report.html
$ pip install pytest mypy && pytest && mypy .
```
{needs}
A run without a GPU is called `{name}_cpu` and lies in `runs/{name}_cpu`: `metrics.jsonl` has a line for each step,
`reward.png` the curve, `model/` the trained model. The same command goes on with a run that was stopped.

| | |
|---|---|
{files}

From here: say in the workflow what the model is asked and what an answer is worth; give it rows of your own (`dataset`
in the settings says where they come from); look at a few answers with `try` before you train. Any setting may follow a
command (`--rollout.group_size 16`), and `areal-async run --help-settings` lists them. On a machine with a GPU,
`--config configs/workflow_cpu.yaml` takes the small model all the same. From Python:

```python
import areal_async

run = areal_async.train("workflow.py", run={{"name": "longer", "steps": 80}})
print(run.status, run.metrics[-1]["reward_mean"], run.model)
```
"""

_NEEDS = """
It needs what does not come with areal-async: `pip install {packages}`.
"""


def pyproject(untyped: Sequence[str]) -> str:
    """Return the settings of mypy and pytest; ``untyped`` packages are imported and bring no types."""
    modules = ", ".join(f'"{name}.*"' for name in untyped)
    return _PYPROJECT + (_OVERRIDES.format(modules=modules) if untyped else "") + _PYTEST


def readme(name: str, sentence: str, files: Sequence[str], needs: Sequence[str]) -> str:
    """Return the guide to a project.

    Args:
        name: of its runs.
        sentence: what its model is asked for.
        files: paths of what else is in it.
        needs: packages that are not installed with this one.
    """
    own = {f"{file.partition('/')[0]}/" if "/" in file else file for file in files}
    rows = [f"| `{one}` | {what} |" for one, what in KINDS.items() if one in own]
    rows += [f"| `{one}` | a module of the workflow's |" for one in sorted(own - {*KINDS, "pyproject.toml"})]
    return _README.format(
        name=name,
        sentence=sentence[0].upper() + sentence[1:],
        files="\n".join(rows),
        needs=_NEEDS.format(packages=" ".join(needs)) if needs else "",
    )
