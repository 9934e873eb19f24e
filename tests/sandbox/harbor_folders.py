"""Harbor tasks for tests, with an image that needs no registry."""

from __future__ import annotations

from pathlib import Path
from typing import Final

__all__ = ["IMAGE", "START_KEEPER", "TASKS", "write_task", "write_tasks"]

IMAGE: Final = "localhost/deltarunner-tests:probe"

CONFIGURATION: Final = """version = "1.0"
[metadata]
difficulty = "easy"
[agent]
timeout_sec = 60
[verifier]
timeout_sec = 30
[environment]
{image}
memory_mb = 64
network_mode = "no-network"
"""

START_KEEPER: Final = "touch /tmp/keeper; while :; do echo beat >/tmp/beat; sleep 0.1; done >/dev/null 2>&1 &"
"""The shell command that solves the task "server"."""

TASKS: Final = {
    # A task with a file, a Dockerfile, and a reward as text.
    "greeting": {
        "instruction.md": "Write hello into greeting.txt.",
        "environment/Dockerfile": f"FROM {IMAGE}\nCOPY name.txt /etc/name.txt\n",
        "environment/name.txt": "Ada",
        "tests/test.sh": "#!/bin/sh\ngrep -q hello greeting.txt && reward=1 || reward=0\n"
        "echo $reward >/logs/verifier/reward.txt\n",
        "solution/solve.sh": "#!/bin/bash\necho hello >greeting.txt\n",
    },
    # A task with variables, a user, and a reward as JSON with a second number.
    "sum": {
        "task.toml": CONFIGURATION.format(image=f'docker_image = "{IMAGE}"')
        + '[environment.env]\nFIRST = "20"\n[verifier.env]\nEXPECTED = "${TEST_EXPECTED:-42}"\n'
        + '[solution.env]\nSECOND = "22"\n',
        "instruction.md": "Write the sum of $FIRST and 22 into sum.txt.",
        "tests/test.sh": "#!/bin/bash\n. /tests/numbers.sh\n"
        'found=$(cat sum.txt 2>/dev/null); [ "$found" = "$EXPECTED" ] && reward=1 || reward=0\n'
        'echo "{\\"reward\\": $reward, \\"length\\": ${#found}, \\"version\\": $VERSION}"'
        " >/logs/verifier/reward.json\n",
        "tests/numbers.sh": "VERSION=3\n",
        "solution/solve.sh": "#!/bin/sh\necho $((FIRST + SECOND)) >sum.txt\n",
    },
    # A task with a process that must be running when the verifier checks. If it was started, the verifier waits up to
    # 20 seconds for its next line.
    "server": {
        "instruction.md": "Create /tmp/keeper, and start a process that writes beat into /tmp/beat again and again.",
        "tests/test.sh": "#!/bin/bash\nrm -f /tmp/beat; reward=0; tries=200\n"
        "while [ -e /tmp/keeper ] && [ $reward = 0 ] && [ $((tries--)) -gt 0 ]; do\n"
        "  sleep 0.1; [ -s /tmp/beat ] && reward=1\ndone\n"
        "echo $reward >/logs/verifier/reward.txt\n",
        "solution/solve.sh": f"#!/bin/sh\n{START_KEEPER}\n",
    },
}
"""The files of each task."""


def write_task(folder: Path, files: dict[str, str]) -> Path:
    """Write a task. Without a configuration, it gets the image of the tests, or its own Dockerfile."""
    image = "" if "environment/Dockerfile" in files else f'docker_image = "{IMAGE}"'
    for name, text in {"task.toml": CONFIGURATION.format(image=image), **files}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def write_tasks(folder: Path, names: tuple[str, ...] = tuple(TASKS)) -> Path:
    """Write several of the tasks."""
    for name in names:
        write_task(folder / name, TASKS[name])
    return folder
