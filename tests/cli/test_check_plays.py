"""`deltarunner check`: mistakes that appear only if episodes are played in groups, in sequence, or with other tools."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checking import GOOD, check, findings, folder_of_modules

pytestmark = pytest.mark.slow

BAD = {
    # --- remaining processes
    "process": """
    def setup(self):
        self.server = subprocess.Popen(["sleep", "600"])
        PIDS.append(self.server.pid)
""",
    "temporary folder": """
    def setup(self):
        self.place = tempfile.mkdtemp()
""",
    # --- differences within a group
    "world of the seed": """
    def prompt(self):
        return f"Roll a {self.episode.seed % 1000}."
""",
    "world of the index": """
    @tool
    def number(self) -> int:
        "Tell the number."
        return self.episode.index
""",
    # --- the event loop
    "blocks briefly": """
    limits = Limits(turns=2)
    @tool
    async def ask(self) -> str:
        "Ask."
        time.sleep(0.3)
        return "asked"
""",
    "not awaited": """
    @tool
    async def wait(self) -> str:
        "Wait."
        anyio.sleep(1)
        return "waited"
""",
    # --- tools
    "tools of a turn that depend on each other": """
    last = 0
    @tool
    async def move(self, number: int) -> str:
        "Move."
        await anyio.lowlevel.checkpoint()
        self.last = number
        return "moved"
    @reward
    def where(self) -> float:
        return self.last
""",
    "default that its type refuses": """
    @tool
    def search(self, limit: int = None) -> str:
        "Search."
        return "found"
""",
    "tool of setup": """
    def setup(self):
        self.tools.append(Tool(self.draw))
    def draw(self) -> float:
        "Draw."
        return random.random()
""",
    "tool of another agent": """
    async def rollout(self, conversation):
        await conversation.generate()
        guest = self.episode.conversation("guest", prompt="Draw.", tools=[Tool(self.draw)], train=True)
        turn = await guest.generate()
        guest.add(await guest.call_tools(turn))
        await guest.generate()
    def draw(self) -> float:
        "Draw."
        return random.random()
""",
    "default that is changed": """
    @tool
    def draw(self, word: str) -> int:
        "Draw."
        return self.count_up()
    def count_up(self, seen: list = []) -> int:
        seen.append(1)
        return len(seen)
""",
    "random message of rollout": """
    async def rollout(self, conversation):
        conversation.add(f"Now roll a {random.random()}.")
        await super().rollout(conversation)
""",
    "the same id twice": """
    def tasks(self):
        return [Task(id="t", prompt=f"Roll a {number}.", answer="1") for number in range(3)]
""",
    "failure with an address": """
    def setup(self):
        raise ValueError(f"{object()} of {self.task.id} is broken, at {id(self)}")
""",
}

SAYS = {
    "process": (3, r"still open after close\(\): self.server \(process sleep 600\). Close it in close\(\)"),
    "temporary folder": (
        3,
        r"left among the temporary files: 4 files or folders, such as tmp\w+, after close\(\)\. Use",
    ),
    "world of the seed": (
        3,
        r"prompt\(\) returned another prompt in 4 of 4 episodes when another episode of the group .* self.episode.rng",
    ),
    "world of the index": (
        3,
        r"tool number\(\) returned another result in 4 of 4 episodes when another episode of the group played",
    ),
    "blocks briefly": (3, r"the event loop was blocked for .* in Env.ask \(.*mine.py:\d+\): it blocks the event loop"),
    "not awaited": (3, r"error    coroutine 'sleep' was never awaited \(.*mine.py:\d+\): write `await` before it"),
    "tools of a turn that depend on each other": (
        3,
        r"where\(\) returned another value in \d of 4 episodes when two calls of one turn ended in .*parallel=False",
    ),
    "default that its type refuses": (3, "parameter 'limit': its default None does not fit its type"),
    "tool of setup": (
        3,
        r"tool draw\(\) returned another result in 4 of 4 episodes when the same episode was repeated",
    ),
    "tool of another agent": (
        3,
        r"tool draw\(\) returned another result in 4 of 8 episodes when the same episode was repeated",
    ),
    "default that is changed": (
        3,
        r"error    Env.count_up\(seen=\), a default, was changed during play",
    ),
    "random message of rollout": (
        3,
        r"error    rollout\(\) added another message in 4 of 4 episodes when the same episode was",
    ),
    "the same id twice": (3, "error    task 2 has the same id 't' as task 1"),
    "failure with an address": (3, "error    env_error: ValueError: <object object at 0x"),
}
IMPORTS = "\nimport anyio, anyio.lowlevel, subprocess, tempfile\nPIDS = []\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from folder_of_modules(tmp_path, monkeypatch)


# The planted mistakes leave processes running.
@pytest.mark.sample_cases(4)
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("mistake", BAD)
def test_each_mistake_is_named_with_its_fix(folder: Path, mistake: str) -> None:
    code, said = SAYS[mistake]
    try:
        result = check(folder, f"{GOOD}{IMPORTS}\nclass Env(Good):\n{BAD[mistake]}")
    finally:
        for process in getattr(sys.modules.get("mine"), "PIDS", ()):
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
    lines = findings(result)
    assert [line for line in lines if re.search(said, line)], result.output
    assert result.exit_code == code, result.output
    assert len(lines) <= 2, result.output


def test_every_mistake_has_its_message() -> None:
    assert BAD.keys() == SAYS.keys()


@pytest.mark.parametrize("mistake", ["failure with an address", "the same id twice", "random message of rollout"])
def test_mistake_in_several_episodes_makes_one_finding(folder: Path, mistake: str) -> None:
    assert len(findings(check(folder, f"{GOOD}{IMPORTS}\nclass Env(Good):\n{BAD[mistake]}"))) == 1


def test_tools_that_setup_brings_are_listed_and_called(folder: Path) -> None:
    env = """
class Env(Good):
    def setup(self):
        self.tools.append(Tool(self.count_up))
    def count_up(self, by: int) -> int:
        "Count up."
        CALLED.append(by)
        return by
"""
    result = check(folder, f"{GOOD}\nCALLED = []\n{env}")
    assert "tools    roll(times), count_up(by)" in result.output
    assert sys.modules["mine"].CALLED


def test_group_whose_members_differ_has_no_finding(folder: Path) -> None:
    env = """
class Env(Good):
    def setup(self):
        self.secret = self.episode.rng.random()
    @tool
    def tell(self) -> float:
        "Tell the secret."
        return self.secret
    @group_reward
    def first(self, group):
        return [float(number == 0) for number, _ in enumerate(group.trajectories)]
"""
    result = check(folder, GOOD + env)
    assert (result.exit_code, findings(result)) == (0, []), result.output


def test_tools_of_a_turn_that_do_not_hang_on_one_another_are_ok(folder: Path) -> None:
    env = """
class Env(Good):
    def setup(self):
        self.seen, self.log = set(), []
    @tool
    async def look(self, number: int) -> int:
        "Look."
        self.log.append(number)  # before anything is waited for: in the order of the calls
        await anyio.lowlevel.checkpoint()
        self.seen.add(number)
        return self.log.index(number)
    @tool(parallel=False)
    async def last(self) -> int:
        "Look at the last one."
        await anyio.lowlevel.checkpoint()
        return self.log[-1] if self.log else 0
    @reward
    def all_seen(self) -> float:
        return float(sum(self.seen))
"""
    result = check(folder, f"{GOOD}{IMPORTS}{env}")
    assert (result.exit_code, findings(result)) == (0, []), result.output


def test_temporary_files_that_are_removed_or_made_once_are_ok(folder: Path) -> None:
    env = """
class Env(Good):
    def setup(self):
        self.place = self.episode.exit_stack.enter_context(tempfile.TemporaryDirectory())
        cache = os.path.join(tempfile.gettempdir(), "cache")
        os.makedirs(cache, exist_ok=True)
"""
    before = os.environ.get("TMPDIR")
    result = check(folder, f"{GOOD}{IMPORTS}import os\n{env}")
    assert (result.exit_code, findings(result)) == (0, []), result.output
    assert os.environ.get("TMPDIR") == before
