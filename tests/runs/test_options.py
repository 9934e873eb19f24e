"""The options of a run: their list, refusals and defaults."""

from __future__ import annotations

from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import pytest

from runner import BadOption, Concurrency, History, Limits, Run, Sampling, ScriptedEngine
from runner.runs.options import RunKeywords, RunOptions
from tests.playing import Plain

GIVEN, KEPT = get_type_hints(RunKeywords), get_type_hints(RunOptions)


def alternatives(hint: Any) -> set[Any]:
    return set(get_args(hint)) if get_origin(hint) in (Union, UnionType) else {hint}


def test_type_checkers_see_every_option_by_its_name() -> None:
    assert list(KEPT) == ["tasks", *GIVEN]


@pytest.mark.parametrize("name", GIVEN)
def test_type_checkers_see_the_types_of_options(name: str) -> None:
    given, kept = alternatives(GIVEN[name]), alternatives(KEPT[name])
    by_name = {str} if name in ("file", "history") else set()
    assert kept <= given
    assert given - kept <= {NoneType} | by_name


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


@pytest.mark.parametrize("name", KEPT)
def test_defaults_have_the_annotated_types(name: str) -> None:
    kinds = tuple(get_origin(each) or each for each in alternatives(KEPT[name]))
    assert isinstance(getattr(RunOptions(), name), kinds)


def test_none_stands_for_the_default_wherever_it_may_be_given() -> None:
    given: Any = {name: None for name, hint in GIVEN.items() if NoneType in alternatives(hint)}
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


def test_unknown_option_is_a_type_error() -> None:
    options: Any = {"groupsize": 4}
    with pytest.raises(TypeError, match="groupsize"):
        Run(Plain, ScriptedEngine("Yes"), **options)


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ({"limits": {"turns": 2}}, r"limits=.*give Limits\(\.\.\.\)"),
        ({"sampling": {}}, r"sampling=.*give Sampling\(\.\.\.\)"),
        ({"concurrency": 4}, r"concurrency=4: give Concurrency\(\.\.\.\)"),
        ({"group_size": "2"}, "group_size='2': give a whole number of at least 1"),
        ({"group_size": 1.5}, "group_size=1.5: give a whole number"),
        ({"group_size": True}, "group_size=True: give a whole number"),
        ({"retries": 1.5}, "retries=1.5: give a whole number of at least 0"),
        ({"seed": "abc"}, "seed='abc': give a whole number"),
        ({"seed": 1.5}, "seed=1.5: give a whole number"),
        ({"breaker": "x"}, "breaker='x': give a share"),
        ({"engines": {"judge": "b"}}, r"engines\['judge'\]='b' is not an engine"),
        ({"engines": ["b"]}, "engines=.*give a dict"),
        ({"file": 5}, "file=5: give a path"),
        ({"template_options": {"messages": []}}, r"template_options=\{'messages'"),
        ({"template_options": {"tools": []}}, r"template_options=\{'tools'"),
        ({"template_options": {"add_generation_prompt": True}}, "names that only the template reads"),
    ],
)
def test_an_option_of_the_wrong_kind_is_refused_by_name(option: dict[str, Any], said: str) -> None:
    with pytest.raises(BadOption, match=said):
        Run(Plain, ScriptedEngine("Yes"), **option)


@pytest.mark.parametrize(
    ("engine", "said"),
    [("engine", "engine='engine' is not an engine"), (ScriptedEngine, r"the class: .*ScriptedEngine\(")],
)
def test_values_that_are_not_engines_are_refused_with_the_fix(engine: Any, said: str) -> None:
    with pytest.raises(BadOption, match=said):
        Run(Plain, engine)


@pytest.mark.parametrize("width", [{"episodes": 2.5}, {"episodes": True}, {"threads": 1.5}, {"threads": None}])
def test_concurrency_must_be_a_whole_number(width: dict[str, Any]) -> None:
    with pytest.raises(BadOption, match="give a whole number of at least 1"):
        Concurrency(**width)


@pytest.mark.parametrize("regex", ["(", 5])
def test_invalid_regular_expressions_are_refused_when_given(regex: Any) -> None:
    with pytest.raises(BadOption, match=r"Sampling\(regex=.*correct this regular expression"):
        Sampling(regex=regex)
