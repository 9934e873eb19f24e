"""The options of a run: one list, with what it refuses and what it settles."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from runner import BadOption, Concurrency, History, Limits, Run, Sampling, ScriptedEngine
from runner.runs.options import RunKeywords, RunOptions
from tests.playing import Plain


def test_type_checkers_see_every_option_by_its_name() -> None:
    assert [field.name for field in dataclasses.fields(RunOptions)] == ["tasks", *RunKeywords.__annotations__]


def test_every_option_is_documented_at_its_field() -> None:
    import ast
    import inspect

    from runner.runs import options

    (record,) = (n for n in ast.parse(inspect.getsource(options)).body if getattr(n, "name", "") == "RunOptions")
    assert isinstance(record, ast.ClassDef)
    lines = list(zip(record.body, record.body[1:], strict=False))
    undocumented = [
        ast.unparse(one.target)
        for one, following in lines
        if isinstance(one, ast.AnnAssign) and not isinstance(following, ast.Expr)
    ]
    assert undocumented == []


def test_none_stands_for_the_default() -> None:
    given: Any = {field.name: None for field in dataclasses.fields(RunOptions) if "None" in str(field.type)}
    given |= dict.fromkeys(("engines", "sampling", "limits", "concurrency", "template_options", "weights", "history"))
    options = RunOptions(**given)
    assert options == RunOptions()
    assert (options.sampling, options.limits, options.concurrency) == (Sampling(), Limits(), Concurrency())
    assert (options.engines, options.history) == ({}, History())


def test_a_file_and_a_policy_may_be_given_by_name() -> None:
    given: Any = {"file": "runs/one.db", "history": "fork"}
    options = RunOptions(**given)
    assert (options.file, options.history) == (Path("runs/one.db"), History.of("fork"))


@pytest.mark.parametrize(
    ("indices", "said"),
    [([2], "a group has the episodes 0 to 1"), ([-1], "indices=-1: give a whole"), ([True], "indices=True")],
)
def test_an_index_that_no_group_has_is_refused(indices: list[Any], said: str) -> None:
    with pytest.raises(BadOption, match=said):
        RunOptions(group_size=2, indices=indices)


def test_an_option_that_there_is_not_is_a_mistake_of_the_call() -> None:
    options: Any = {"groupsize": 4}
    with pytest.raises(TypeError, match="groupsize"):
        Run(Plain, ScriptedEngine("Yes"), **options)
