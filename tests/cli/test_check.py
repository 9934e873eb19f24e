"""`deltarunner check`: each mistake, alone in an environment, is reported in one line with the fix."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checking import GOOD, check, findings, folder_of_modules

pytestmark = [pytest.mark.slow, pytest.mark.sample_functions(2)]

BAD = {
    # --- schemas
    "untyped": """
    @tool
    def bad(self, word):
        "Say it."
""",
    "undescribed": """
    @tool
    def bad(self, word: str) -> str:
        return word
""",
    "misdescribed": """
    @tool
    def bad(self, word: str) -> str:
        '''Say it.

        Args:
            wrod: what.
        '''
        return word
""",
    "wrong schema": """
    async def setup(self):
        self.tools.append(Tool(self.roll, name="again", description="Roll.", parameters={"type": "objekt"}))
""",
    "a string or a number": """
    @tool
    def bad(self, word: int | str) -> None:
        "Say it."
""",
    # --- rewards
    "raising reward": """
    @reward
    def bad(self):
        return 1 / len(self.task.info)
""",
    "raising reward after a limit": """
    limits = Limits(turns=2)
    @reward
    def bad(self):
        raise KeyError("score")
""",
    "reward of text": """
    @reward
    def bad(self):
        return "good"
""",
    "reward without end": """
    @reward
    def bad(self):
        return float("inf")
""",
    "metric without end": """
    @metric
    def bad(self):
        return float("nan")
""",
    "raising metric": """
    @metric
    def bad(self):
        return {}["score"]
""",
    "raising group reward": """
    @group_reward
    def bad(self, group):
        return [1]
""",
    "random reward": """
    @reward
    def bad(self):
        return random.random()
""",
    # --- random numbers
    "random tool": """
    @tool
    def bad(self) -> float:
        "Draw."
        return random.random()
""",
    "random prompt": """
    def prompt(self):
        return f"Roll a {random.random()}."
""",
    "random task": """
    def tasks(self):
        return [Task(id="t", prompt=f"Roll a {random.random()}.")]
""",
    "random step": """
    roll = None
    limits = Limits(turns=2)
    def step(self, turn):
        return f"{random.random()}"
""",
    "random end": """
    roll = None
    limits = Limits(turns=4)
    def step(self, turn):
        return None if random.Random(next(CALLS)).random() < 0.4 else "Continue."
""",
    # --- state that episodes share
    "class attribute": """
    seen = []
    @tool
    def bad(self) -> int:
        "Count."
        self.seen.append(1)
        return 1
""",
    "counter of the class": """
    count_of_all = 0
    def setup(self):
        type(self).count_of_all += 1
""",
    "new attribute of the class": """
    def setup(self):
        type(self).last = self.task.id
""",
    "default argument": """
    def __init__(self, seen: list[str] = []):
        super().__init__()
        self.seen = seen
    def setup(self):
        self.seen.append(self.task.id)
""",
    "module variable": """
    def setup(self):
        SEEN[self.task.id] = True
""",
    "shared result": """
    @contextlib.contextmanager
    def lifespan(self):
        yield itertools.count()
    @tool
    def bad(self) -> int:
        "Count."
        return next(self.shared)
""",
    "set in lifespan": """
    @contextlib.contextmanager
    def lifespan(self):
        self.index = {}
        yield
""",
    "attribute that could be shared": """
    words = ["a", "b"]
""",
    # --- the event loop
    "blocking": """
    limits = Limits(turns=2)
    def __init__(self):
        super().__init__(count=1)
    @tool
    async def bad(self) -> str:
        "Wait."
        time.sleep(0.3)
        return "waited"
""",
    # --- resources left open
    "file": """
    def setup(self):
        self.log = open(__file__)
""",
    "thread": """
    def setup(self):
        self.stop = threading.Event()
        self.ticker = threading.Thread(target=self.stop.wait, args=(600,), daemon=True)
        self.ticker.start()
""",
    "thread without an attribute": """
    def setup(self):
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
""",
    "task": """
    async def setup(self):
        self.beating = asyncio.create_task(self.beat())
    async def beat(self):
        await asyncio.sleep(60)
""",
    "failing close": """
    def close(self):
        raise OSError("no such connection")
""",
    # --- hooks
    "tool called as a hook": """
    @tool
    def prompt(self) -> str:
        "Tell it again."
        return "Roll."
""",
    "reward called as a hook": """
    @reward
    def close(self):
        return 1.0
""",
    "tool called as the runner's": """
    @tool
    def shared(self) -> str:
        "Tell it again."
        return "Roll."
""",
    "exit_stack in a tool": """
    @tool
    async def bad(self) -> str:
        "Open it."
        self.episode.exit_stack.enter_context(contextlib.nullcontext())
        return "open"
""",
    # --- other mistakes
    "failing setup": """
    def setup(self):
        raise ValueError("no luck")
""",
    "no task": """
    def tasks(self):
        return []
""",
}

SAYS = {
    "untyped": (3, "Env.bad, parameter 'word': it has no type: annotate it"),
    "undescribed": (3, "Env.bad is a tool without a docstring"),
    "misdescribed": (3, "its docstring describes 'wrod', but its parameters are: word. Rename it"),
    "wrong schema": (3, 'Tool again: parameters must be a JSON schema with "type": "object"'),
    "a string or a number": (
        0,
        "warning  bad(word: string | integer) takes strings and other values. Many chat templates write strings "
        "without quotes (untyped), so a text that looks like such a value is not read as a string. Give it one type",
    ),
    "raising reward": (3, "error    env_error: reward bad(): ZeroDivisionError: division by zero"),
    "raising reward after a limit": (3, "error    reward bad(): KeyError: 'score'"),
    "reward of text": (3, "bad returned the string 'good'|bad returned 'good'; return a number, a bool or None"),
    "reward without end": (3, "bad returned inf; a reward is a finite number"),
    "metric without end": (0, "warning  metric bad(): ValueError: bad returned nan; a metric is a finite number"),
    "raising metric": (0, "warning  metric bad(): KeyError: 'score'"),
    "raising group reward": (3, "group_reward bad"),
    "random reward": (3, "bad() returned another value in 4 of 4 episodes when the same episode was"),
    "random tool": (3, "tool bad() returned another result in 4 of 4 episodes when the same episode was"),
    "random prompt": (3, "prompt() returned another prompt in 4 of 4 episodes when the same episode was"),
    "random task": (3, "tasks() returned another prompt in 1 of 1 episodes when the same episode was"),
    "random step": (3, "step() returned another reply in 4 of 4 episodes when the same episode was"),
    "random end": (3, "step() ended the episode at another point in .* of 4 episodes when the same episode was"),
    "class attribute": (3, "error    Env.seen was changed during play, and all episodes share it: keep it"),
    "counter of the class": (3, "error    Env.count_of_all was changed during play"),
    "new attribute of the class": (3, "error    Env.last was changed during play"),
    "default argument": (3, "error    Env(seen=), a default, was changed during play"),
    "module variable": (0, "warning  mine.SEEN was changed during play"),
    "shared result": (3, "tool bad() returned another result in 4 of 4 episodes when played after other"),
    "set in lifespan": (3, "lifespan() sets self.index, but each episode has its own environment object"),
    "attribute that could be shared": (
        0,
        "warning  Env.words is a list of the class, which all episodes share: create",
    ),
    "blocking": (3, r"the event loop was blocked for .* in Env.bad (.*mine.py:\d+): it blocks the event loop: make"),
    "file": (3, "still open after close(): self.log (file .*mine.py). Close it in close(), or open it in setup() with"),
    "thread": (3, "still open after close(): self.ticker (thread 'Thread (wait)'). Close it in close()"),
    "thread without an attribute": (3, "still open after close(): thread 'Thread (sleep)'. Close it in close()"),
    "task": (3, "still open after close(): a task of Env.beat(). Close it in close()"),
    "failing close": (0, "warning  close(): OSError: no such connection"),
    "tool called as a hook": (3, "@tool prompt() is a hook's name: the runner calls it too. Rename the method."),
    "reward called as a hook": (3, "@reward close() is a hook's name: the runner calls it too. Rename the method."),
    "tool called as the runner's": (
        3,
        "@tool shared() is a name that the runner uses for something else. Rename the method.",
    ),
    "exit_stack in a tool": (3, "episode.exit_stack can be entered in setup() only"),
    "failing setup": (3, "error    env_error: ValueError: no luck (in setup"),
    "no task": (3, "error    tasks() returns no task."),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    yield from folder_of_modules(tmp_path, monkeypatch)


def test_an_environment_without_a_mistake_is_ok(folder: Path) -> None:
    result = check(folder, GOOD + "\nclass Env(Good):\n    pass\n", "--set", "faces=[1, 2]")
    assert (result.exit_code, findings(result)) == (0, [])
    assert result.output.endswith("ok\n")
    assert "played   in groups of two, on a scripted engine: completed 8; 64 turns" in result.output


def test_strict_tool_with_an_optional_argument_has_no_finding(folder: Path) -> None:
    env = """
class Env(Good):
    @tool(strict=True)
    def put(self, value: int, note: str | None = None) -> int:
        "Put it."
        return value
"""
    result = check(folder, GOOD + env)
    assert (result.exit_code, findings(result)) == (0, [])


# The planted mistakes leave files open.
@pytest.mark.sample_cases(2)
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("mistake", BAD)
def test_each_mistake_is_named_with_its_fix_in_one_line(folder: Path, mistake: str) -> None:
    code, said = SAYS[mistake]
    result = check(folder, f"{GOOD}\nSEEN, CALLS = {{}}, itertools.count()\n\nclass Env(Good):\n{BAD[mistake]}")
    patterns = [re.sub(r"\\\.\\\*", ".*", re.escape(one)).replace(r"\\d\+", r"\d+") for one in said.split("|")]
    lines = findings(result)
    found = [line for line in lines if any(re.search(pattern, line) for pattern in patterns)]
    assert found, result.output
    assert result.exit_code == code, result.output
    # One line for each mistake, also if several episodes make it.
    assert len(lines) <= 2, result.output


def test_every_mistake_has_its_message() -> None:
    assert BAD.keys() == SAYS.keys()


def test_some_of_many_open_resources_are_named_and_the_rest_counted(folder: Path) -> None:
    env = """
class Env(Good):
    def setup(self):
        for number in range(5):
            name = f"{self.task.id}-{number}"
            threading.Thread(target=time.sleep, args=(600,), daemon=True, name=name).start()
"""
    lines = findings(check(folder, GOOD + env))
    assert len(lines) == 4
    assert re.search(r"still open after close\(\): \d+ more leaks?\. Close each in close\(\)", lines[-1])


def test_changed_constructor_list_is_found(folder: Path) -> None:
    env = """
class Env(Good):
    def setup(self):
        self.construction()["faces"].append(7)
"""
    result = check(folder, GOOD + env, "--set", "faces=[1, 2]")
    assert result.exit_code == 3
    assert "error    Env(faces=) was changed during play" in result.output


def test_file_opened_once_for_all_episodes_is_not_a_leak(folder: Path) -> None:
    env = """
class Env(Good):
    def setup(self):
        with ONE:  # episodes are set up in threads
            if "log" not in OPENED:
                OPENED["log"] = open(__file__)
"""
    lines = findings(check(folder, GOOD + "\nimport threading\nOPENED, ONE = {}, threading.Lock()\n" + env))
    sys.modules["mine"].OPENED["log"].close()
    assert [line for line in lines if "still open" in line] == []


def test_task_source_that_receives_results_passes_the_check(folder: Path) -> None:
    env = """
class Source:
    def __init__(self, tasks):
        self.waiting, self.done = list(tasks), []
    def __iter__(self):
        yield from self.waiting
    def finished(self, trajectory):
        self.done.append(trajectory.task.id)

class Env(Good):
    def tasks(self):
        return Source(super().tasks())
"""
    result = check(folder, GOOD + env)
    assert (result.exit_code, findings(result)) == (0, []), result.output


def test_tasks_may_be_asynchronous(folder: Path) -> None:
    env = """
class Env(Good):
    async def tasks(self):
        for task in super().tasks():
            yield task
"""
    result = check(folder, GOOD + env)
    assert (result.exit_code, findings(result)) == (0, []), result.output


def test_class_without_reward_is_refused_before_play(folder: Path) -> None:
    env = "\nclass Env(Environment):\n    def tasks(self):\n        raise SystemExit\n"
    result = check(folder, GOOD + env)
    assert result.exit_code == 3


def test_environment_with_constrained_turns_passes(folder: Path) -> None:
    env = """
import json, re
from runner import Sampling
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "minLength": 3}, "days": {"type": "integer",
    "minimum": 1, "maximum": 5}}, "required": ["city", "days"], "anyOf": [{"required": ["city"]}]}

class Env(Good):
    @tool
    def note(self, text: str) -> str:
        "Note it."
        return "noted"

    @tool
    def answer(self, number: int) -> str:
        "Answer."
        return "answered"

    async def rollout(self, conversation):
        said = await conversation.generate(sampling=Sampling(schema=SCHEMA), tool_choice="none")
        trip = json.loads(said.text)
        assert 1 <= trip["days"] <= 5 and len(trip["city"]) >= 3, said.text
        conversation.add("And?")
        said = await conversation.generate(sampling=Sampling(choice=("left", "right")), tool_choice="none")
        assert said.text in ("left", "right"), said.text
        conversation.add("And?")
        said = await conversation.generate(sampling=Sampling(regex="[0-9]{3}-[a-c]+"), tool_choice="none")
        assert re.fullmatch("[0-9]{3}-[a-c]+", said.text), said.text
        for name in ("answer", "note"):
            conversation.add("And?")
            said = await conversation.generate(tool_choice=name)
            assert [call.name for call in said.tool_calls] == [name], said.text
            await self.episode.answer(said)
"""
    result = check(folder, GOOD + env)
    assert (result.exit_code, findings(result)) == (0, []), result.output


@pytest.mark.sample_cases(2)
@pytest.mark.parametrize(
    "change",
    [
        "STATE['deep']['list'].append(1)",
        "STATE['set'].add(self.task.id)",
        "STATE['bytes'].extend(b'x')",
        "STATE['pair'][0].append(1)",
        "STATE['long'].append(1)",
        "STATE['object'] = object()",
        "pass",
    ],
)
def test_deep_change_is_found_without_copying(folder: Path, change: str) -> None:
    env = f"""
class Uncopied:
    def __deepcopy__(self, memo):
        raise RuntimeError
    __copy__ = __eq__ = __deepcopy__
    __hash__ = object.__hash__

STATE = {{"deep": {{"list": []}}, "set": {{1}}, "bytes": bytearray(), "pair": ([], 1), "long": [0] * 20_000,
         "object": Uncopied()}}
STATE["itself"] = STATE

class Env(Good):
    def setup(self):
        {change}
"""
    result = check(folder, GOOD + env, "-n", "1")
    found = [line.partition(" during")[0] for line in findings(result)]
    assert found == ([] if change == "pass" else ["warning  mine.STATE was changed"])


def test_keywords_that_are_not_enforced_or_not_checked_are_warned_of(folder: Path) -> None:
    env = r"""
class Env(Good):
    async def setup(self):
        await super().setup()
        odd = {"properties": {"a": {"type": "float"}, "b": {"type": "array", "uniqueItems": True}}, "type": "object"}
        self.tools.append(Tool(lambda given: "", name="odd", description="Say.", parameters=odd, raw=True))
"""
    result = check(folder, GOOD + env)
    unchecked, unenforced = findings(result)
    assert "odd(): its schema is not checked completely: type of a ('float' is not a type" in unchecked
    assert "odd(): uniqueItems of b of its schema is not enforced where a call is required" in unenforced
