"""The sample of the tests: every marked test has seeds that choose it, and a test that is named is always played."""

from __future__ import annotations

import inspect
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis.internal.conjecture import providers

from tests import samples, sweeps


class Item:
    def __init__(self, **fields: Any) -> None:
        self.__dict__ |= fields


def made(
    function: str, mark: pytest.MarkDecorator | None, *, case: str = "", module: str = "", own: bool = True
) -> Any:
    marks = [] if mark is None else [mark.mark]
    return Item(
        name=f"{function}[{case}]",
        originalname=function,
        path=Path(module or "test_a.py"),
        nodeid=f"{module or 'test_a.py'}::{function}[{case}]",
        own_markers=marks if own else [],
        get_closest_marker={each.name: each for each in marks}.get,
    )


@pytest.fixture(autouse=True)
def seed_as_before() -> Iterator[None]:
    whole, seed = sweeps.whole(), sweeps._seed
    yield
    sweeps.begin(whole=whole, seed=seed)


def played(items: list[Any], seed: int, *, whole: bool = False) -> list[Any]:
    sweeps.begin(whole=whole, seed=seed)
    left_out = samples.outside(items)
    return [item for item in items if item not in left_out]


TWO = pytest.mark.sample_cases(2)
ENGINES = pytest.mark.sample_units("engines")
ENDS = pytest.mark.sample_units("ends", 2)


def test_two_seeds_play_all_cases_and_a_test_without_cases_always() -> None:
    cases = [made("test_it", TWO, case=str(number)) for number in range(5)]
    alone, unmarked = made("test_alone", TWO), made("test_other", None)
    for seed in (7, 8):
        assert {alone, unmarked} <= {*played([*cases, alone, unmarked], seed)}
    first, second = (played(cases, seed) for seed in (7, 8))
    assert {len(first), len(second)} == {2, 3}
    assert {*first} | {*second} == {*cases}


def test_marked_modules_are_played_whole_by_one_seed_each() -> None:
    modules = [[made(f"test_{number}", ENGINES, module=module, own=False) for number in range(3)] for module in "abc"]
    every = [test for module in modules for test in module]
    by_seed = [played(every, seed) for seed in range(3)]
    assert sorted(modules.index(each) for each in by_seed) == [0, 1, 2]


def test_two_seeds_play_all_marked_functions_with_all_cases() -> None:
    functions = [
        [made(name, ENDS, case=case, module=module) for case in "xy"]
        for name, module in (("test_1", "a"), ("test_2", "a"), ("test_3", "b"), ("test_4", "b"))
    ]
    every = [test for function in functions for test in function]
    first, second = played(every, 0), played(every, 1)
    assert len(first) == len(second) == 4
    assert {*first} | {*second} == {*every}
    assert all({*function} <= {*first} or {*function} <= {*second} for function in functions)


def test_two_seeds_play_all_functions_of_a_marked_file() -> None:
    mark = pytest.mark.sample_functions(2)
    functions = [[made(name, mark, case=case, own=False) for case in "xy"] for name in ("test_1", "test_2", "test_3")]
    other = [made("test_4", mark, module="b", own=False), made("test_5", None)]
    every = [*(test for function in functions for test in function), *other]
    first, second = played(every, 0), played(every, 1)
    assert {*first} & {*second} == {*other}
    assert {*first} | {*second} == {*every}
    assert all({*function} <= {*first} or {*function} <= {*second} for function in functions)


def test_tests_of_a_unit_are_played_together() -> None:
    unit = [made(name, pytest.mark.sample_units("engines", unit="lent")) for name in ("test_1", "test_2")]
    other = [made("test_3", pytest.mark.sample_units("engines"))]
    assert sorted(len(played([*unit, *other], seed)) for seed in (0, 1)) == [1, 2]


def test_a_test_that_is_named_alone_is_played_by_every_seed() -> None:
    for seed in range(4):
        assert len(played([made("test_1", ENGINES)], seed)) == 1
        assert len(played([made("test_1", ENDS)], seed)) == 1
        assert len(played([made("test_1", TWO, case="5")], seed)) == 1


def test_a_whole_sweep_plays_all() -> None:
    every = [
        *(made("test_it", TWO, case=str(number)) for number in range(5)),
        *(made(name, ENGINES, module=name) for name in "abc"),
        *(made(name, ENDS) for name in ("test_1", "test_2", "test_3")),
    ]
    assert played(every, 3, whole=True) == every


def test_global_generators_are_seeded_before_each_test() -> None:
    def drawn() -> list[float]:
        return [random.random(), float(np.random.random()), float(torch.rand(1))]

    first = drawn()
    sweeps.seed_libraries()
    assert drawn() == first


def test_property_tests_draw_no_constants_of_loaded_modules() -> None:
    assert len(providers._get_local_constants()) == 0
    assert "_get_local_constants()" in inspect.getsource(providers.HypothesisProvider), "Hypothesis has another name"
