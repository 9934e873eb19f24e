"""The real command line in another process, with a scripted engine.

Usage: python -m tests.faults.command run ENV ...
"""

from __future__ import annotations

from typing import Any

from runner import ScriptedEngine
from runner.cli import app as cli
from runner.cli import run
from runner.engines.base import Engine

__all__ = ["AUTHOR", "scripted_engine"]

AUTHOR = '''
import contextlib, time
from runner import Environment, Limits, Task, reward

class Greeting(Environment):
    """Says hello."""
    def __init__(self, count: int = 8):
        self.count = count
    def tasks(self):
        return [Task(id=f"t-{n}", prompt="hello " * 100) for n in range(self.count)]
    @reward
    def polite(self):
        return self.episode.text == "hi"

class Rewardless(Environment):
    def tasks(self):
        return [Task(id="1", prompt="hello")]

class Nameless(Greeting):
    def tasks(self):
        return [Task(id="1", prompt="hello"), Task(id="", prompt="who am I?")]

class Twice(Greeting):
    def tasks(self):
        return [Task(id="1", prompt="hello"), Task(id="same", prompt="a"), Task(id="same", prompt="b")]

class Long(Greeting):
    def tasks(self):
        return [Task(id="endless", prompt="hello " * 1000)]

class OneLong(Greeting):
    def tasks(self):
        return [*super().tasks(), Task(id="endless", prompt="hello " * 1000)]

class Exploding(Greeting):
    def tasks(self):
        yield Task(id="1", prompt="hello")
        raise OSError("the dataset is gone")

class Raising(Greeting):
    def tasks(self):
        raise FileNotFoundError("no puzzles here")

class Disconnected(Greeting):
    @contextlib.contextmanager
    def lifespan(self):
        raise OSError("the database is gone")
        yield

class Hanging(Greeting):
    limits = Limits(setup_seconds=0.5)
    def setup(self):
        if self.task.id == "t-3":
            time.sleep(3600)
'''
"""The file mine.py of an author who makes every mistake once."""


def scripted_engine(settings: Any) -> Engine:
    return ScriptedEngine("hi", context=2000)


if __name__ == "__main__":
    run.run_command.__defaults__ = (scripted_engine,)
    cli.main()
