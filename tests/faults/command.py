"""The real command line in a process of its own, but for its engine, which is a scripted one.

Usage: python -m tests.faults.command run ENV ...
"""

from __future__ import annotations

from typing import Any

from runner import ScriptedEngine
from runner.cli import app as cli
from runner.cli import run
from runner.engines.base import Engine


def scripted_engine(settings: Any) -> Engine:
    return ScriptedEngine("hi", context=2000)


if __name__ == "__main__":
    run.run_command.__defaults__ = (scripted_engine,)
    cli.main()
