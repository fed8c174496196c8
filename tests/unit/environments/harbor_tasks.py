"""Harbor tasks for tests: sums to be written into files, half a point for each of two."""

from pathlib import Path

INSTRUCTION = "Write the sum of the numbers in numbers.txt to sum.txt, and how many they are to count.txt.\n"
TASK = """
version = "1.0"
[metadata]
author_name = "nobody"
[verifier]
timeout_sec = 60.0
[agent]
timeout_sec = 60.0
[environment]
memory = "512M"
storage = "64M"
"""
TESTS = """#!/bin/bash
python3 /tests/check.py "$1" > /logs/verifier/said 2>&1
"""
CHECK = """
import json, pathlib
expected = json.loads(pathlib.Path("/tests/expected.json").read_text())
def is_right(name):
    try:
        return pathlib.Path("/app", name).read_text().strip() == str(expected[name])
    except OSError:
        return False
reward = sum(map(is_right, expected)) / len(expected)
if {is_table}:
    pathlib.Path("/logs/verifier/reward.json").write_text(json.dumps({{"reward": reward, "other": 3}}))
else:
    pathlib.Path("/logs/verifier/reward.txt").write_text(f"{{reward}}\\n")
"""
SOLUTION = "#!/bin/bash\npython3 solver.py\nwc -l < numbers.txt > count.txt\n"
HALF = "awk '{ total += $1 } END { print total }' numbers.txt > sum.txt"


def make_tasks(folder: Path, num_tasks: int = 10) -> Path:
    """Make a folder of tasks."""
    for number in range(num_tasks):
        numbers = [number * 7 + step for step in range(number + 3)]
        files = {
            "instruction.md": INSTRUCTION,
            "task.toml": TASK,
            "environment/numbers.txt": "".join(f"{one}\n" for one in numbers),
            "environment/solver.py": "print(sum(map(int, open('numbers.txt'))), file=open('sum.txt', 'w'))\n",
            "tests/test.sh": TESTS,
            "tests/check.py": CHECK.format(is_table=number % 2),
            "tests/expected.json": f'{{"sum.txt": {sum(numbers)}, "count.txt": {len(numbers)}}}',
            "solution/solve.sh": SOLUTION,
        }
        for name, content in files.items():
            path = folder / f"sum-{number:02}" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
    return folder
