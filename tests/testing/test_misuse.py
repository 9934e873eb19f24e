"""A wrong argument leads to one message that names the right one, without a traceback through the kit."""

from __future__ import annotations

import pytest

from tests.testing.inner import run

pytest_plugins = ["pytester"]

MISUSES = {
    "play(Calculator, 5)": "play(..., 5): give an engine, such as the fixture `scripted_engine`, or replies: *",
    "play(Calculator, ScriptedEngine)": "play(..., ScriptedEngine): give an engine, such as the fixture*",
    "play('calculator', 'x')": "play('calculator', ...): give an environment, such as Calculator*",
    "play(Calculator, 'x', task=3)": "play(task=3): give a Task, or the id of one of the environment's tasks.",
    "play(Calculator, 'x', task='no')": "None of 3 tasks has the id 'no'; the first ids are '6', '7', '8'.",
    "play(Calculator, 'x', turns=3)": "play(turns=): unknown option; the options are group_size, *observers.",
    "play(Calculator, 'x', limits={'turns': 3})": "limits={'turns': 3}: give Limits(...).",
    "play(Calculator, 'x', clock=5)": "play(clock=5): give the fixture `virtual_clock`, or VirtualClock().",
    "play(Calculator, lambda asked: 5)": "*<lambda>(), which plays the model, returned 5 (int): return a string*",
    "play(Calculator, lambda asked: 1 / 0)": "*<lambda>(), which plays the model, raised ZeroDivisionError*",
    "play(Calculator, lambda: 'x')": "*<lambda>(), which plays the model, raised TypeError*1 was given",
    "play(Calculator, [['x', 5]])": "['x', 5] is not a reply: give a string, call(...), a list of them, or Reply(...).",
    "play_many(Calculator, 'x', tasks=-1)": "play_many(tasks=-1): give a number of at least 1, or a list of tasks.",
    "play_cancelled(Calculator, 'x', check='x')": "play_cancelled(check='x'): give a function of one argument.",
    "scripted_engine.say()": "say(): give a reply: a string, call(...), *",
    "scripted_engine.say(None)": "None is not a reply: give a string, call(...), a list of them, or Reply(...).",
    "scripted_engine.say('x', chunks=0)": "chunks=0: give a size of at least 1, a tuple of such sizes*",
    "scripted_engine.say('x', chunks=1.5)": "chunks=1.5: give a size of at least 1*",
    "scripted_engine.say('x', chunks=())": "chunks=(): give a size of at least 1*",
    "scripted_engine.say('x', chunks=inside('y'))": "inside('y'): 'y' does not occur in 'x': name a piece *",
    "scripted_engine.say('x', fault='error')": "fault='error': give Fault.error(at=3), *",
    "scripted_engine.say('x', latency=5)": "latency=5: give Latency(first=..., between=...), in ticks.",
    "assert_exact('x')": "assert_exact('x'): give a trajectory, as play(...) returns it.",
    "record('x')": "record('x'): give the engine to record.",
    "replay('no.json')": "the recording no.json does not exist: run pytest with --runner-record=once*",
    "VirtualClock().jump(-1)": "jump(-1): give a number of seconds, 0 or more.",
    "no_leaks('x').__enter__()": "no_leaks('x'): give engines, whose requests are checked, or nothing.",
    "tool_calls(Calculator)": "tool_calls(<class 'calculator.Calculator'>): give an environment's tools: *",
    "anyio.run(cancel_everywhere, later())": "cancel_everywhere(<coroutine *give the `async def` function itself, *",
    "anyio.run(cancel_everywhere, lambda: 5)": "cancel_everywhere(): the scenario returned 5: give an `async def`*",
}

HEAD = """
import anyio
from runner.testing.strategies import tool_calls

async def later(): pass
"""

MARKERS = {
    "colour='red'": "@pytest.mark.scripted_engine: unknown setting 'colour'; the settings are adapters, chunks, *",
    "'hermes'": "@pytest.mark.scripted_engine('hermes'): settings have names, such as template='hermes'; *",
    "template='no'": "template 'no' cannot be read * give one of the bundled names (*",
    "context='big'": "ScriptedEngine(context='big'): give a number of at least 2.",
    "places=1.5": "ScriptedEngine(places=1.5): give a whole number of at least 1.",
    "chunks=0": "chunks=0: give a size of at least 1, a tuple of such sizes*",
}


def test_each_misuse_is_one_message_without_a_traceback_of_the_kit(pytester: pytest.Pytester) -> None:
    tests = [f"def test_{number}(scripted_engine): {line}\n" for number, line in enumerate(MISUSES)]
    result = run(pytester, HEAD + "".join(tests), "--tb=short")
    result.assert_outcomes(failed=len(MISUSES))
    assert sum(line.startswith("E   ") for line in result.outlines) == len(MISUSES)  # one line each
    result.stdout.fnmatch_lines([f"E   *: {_escaped(message)}" for message in MISUSES.values()])
    assert [line for line in result.outlines if "/runner/" in line] == []


def test_each_misuse_of_the_marker_is_one_message(pytester: pytest.Pytester) -> None:
    tests = [
        f"@pytest.mark.scripted_engine({given})\ndef test_{number}(scripted_engine): pass\n"
        for number, given in enumerate(MARKERS)
    ]
    result = run(pytester, "".join(tests))
    result.assert_outcomes(errors=len(MARKERS))
    result.stdout.fnmatch_lines([_escaped(message) for message in MARKERS.values()])
    assert [line for line in result.outlines if "/runner/" in line] == []


def _escaped(message: str) -> str:
    return message.replace("[", "[[]")
