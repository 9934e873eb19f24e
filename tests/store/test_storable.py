"""Values that a run file returns unchanged, and refusals of others with place, type and fix."""

from __future__ import annotations

import array
import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import itertools
import math
import pathlib
import random
import types
import uuid
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from pydantic import BaseModel

from runner.store.json_values import decode_json, encode_json
from runner.store.storable import MAX_DEPTH, TaskCheck, first_unstorable, tuples_in
from runner.tasks import Task


class Color(enum.Enum):
    RED = "red"


class Size(enum.IntEnum):
    BIG = 3


class Name(enum.StrEnum):
    ANN = "ann"


class Mixed(str, enum.Enum):  # noqa: UP042  # as authors write it
    ONE = "one"


@dataclasses.dataclass(frozen=True)
class Point:
    x: int
    y: int


class Model(BaseModel):
    x: int


class Pair(NamedTuple):
    x: int
    y: int


REFUSED: dict[str, tuple[Any, str, str]] = {
    "bytes": (b"\xff", "bytes", "base64"),
    "bytearray": (bytearray(b"x"), "bytearray", "decode"),
    "memoryview": (memoryview(b"x"), "memoryview", "decode"),
    "set": ({1, 2}, "set", "sorted(value)"),
    "frozenset": (frozenset("a"), "frozenset", "sorted(value)"),
    "date": (datetime.date(2026, 1, 2), "datetime.date", "isoformat"),
    "datetime": (datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC), "datetime.datetime", "isoformat"),
    "time": (datetime.time(1, 2), "datetime.time", "isoformat"),
    "duration": (datetime.timedelta(seconds=3), "datetime.timedelta", "total_seconds"),
    "decimal": (decimal.Decimal("1.10"), "decimal.Decimal", "str(value)"),
    "fraction": (fractions.Fraction(1, 3), "fractions.Fraction", "str(value)"),
    "complex": (1j, "complex", "value.real"),
    "uuid": (uuid.UUID(int=1), "uuid.UUID", "str(value)"),
    "path": (pathlib.Path("a"), "pathlib", "str(value)"),
    "enum": (Color.RED, "Color", "value.value"),
    "dataclass": (Point(1, 2), "Point", "dataclasses.asdict"),
    "pydantic": (Model(x=1), "Model", "model_dump"),
    "numpy array": (np.arange(3), "numpy.ndarray", "tolist"),
    "numpy integer": (np.int64(3), "numpy.int64", "item"),
    "numpy float32": (np.float32(0.1), "numpy.float32", "item"),
    "numpy bool": (np.bool_(True), "numpy.bool", "item"),
    "numpy datetime": (np.datetime64("2026-01-01"), "numpy.datetime64", "astype(str)"),
    "tensor": (torch.zeros(2), "torch.Tensor", "tolist"),
    "scalar tensor": (torch.tensor(1.0), "torch.Tensor", "item"),
    "array": (array.array("i", [1]), "array.array", "tolist"),
    "range": (range(3), "range", "list(value)"),
    "deque": (collections.deque([1]), "collections.deque", "list(value)"),
    "generator": ((x for x in [1]), "generator", "list(value)"),
    "class": (int, "type", "__name__"),
    "function": (len, "builtin_function_or_method", "keep it on the environment"),
    "object": (object(), "object", "text, numbers, lists and dicts"),
    "integer key": ({1: "a"}, "int", "str(key)"),
    "none key": ({None: "a"}, "NoneType", "str(key)"),
    "tuple key": ({(1, 2): "a"}, "tuple", "str(key)"),
}

KEPT: dict[str, Any] = {
    "nothing": None,
    "flag": True,
    "large integer": 2**200,
    "negative integer": -(2**63) - 1,
    "float": 0.1,
    "tiny": 5e-324,
    "infinity": math.inf,
    "text": "a\ud800b \x00 ü 😀",
    "empty": {"": [], "a": {}},
    "numpy float64": np.float64(0.1),
    "numpy text": np.str_("a"),
    "integer enum": Size.BIG,
    "text enum": Name.ANN,
    "mixed enum": Mixed.ONE,
    "ordered": collections.OrderedDict(a=1),
    "counter": collections.Counter("aab"),
    "default": collections.defaultdict(list, a=[1]),
    "proxy": types.MappingProxyType({"a": 1}),
    "user dict": collections.UserDict(a=1),
    "enum key": {Name.ANN: 1},
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("inside", [False, True])
def test_value_that_would_change_is_refused_with_place_and_fix(name: str, inside: bool) -> None:
    value, kind, fix = REFUSED[name]
    given, where = ({"a": [0, {"b": value}]}, "info['a'][1]['b']") if inside else ({"key": value}, "info['key']")
    said = first_unstorable(given, "info")
    assert said is not None
    assert said.startswith(where)
    assert kind in said
    assert fix in said


@pytest.mark.parametrize(
    "value",
    [
        np.datetime64("2026-01-01"),
        np.timedelta64(5, "s"),
        np.array(["2026-01-01"], dtype="datetime64[D]"),
        np.array("2026-01-01", dtype="datetime64[us]"),
        np.array(True),
        np.array([(1, "a")], dtype=[("x", "i4"), ("y", "U1")]),
        torch.tensor(1.5),
        datetime.timedelta(seconds=3),
        fractions.Fraction(1, 3),
    ],
    ids=str,
)
def test_fix_makes_a_value_that_is_kept(value: Any) -> None:
    said = first_unstorable(value, "value") or ""
    expression = said.partition("give ")[2].rpartition(", ")[2] or said
    assert first_unstorable(eval(expression, {"value": value}), "value") is None, said


@pytest.mark.parametrize("name", KEPT)
# Each value has an encoder of its own.
@pytest.mark.parametrize("beside", [0, math.nan, 2**70], ids=["plain", "nan", "large"])
def test_value_that_is_kept_comes_back_equal(name: str, beside: Any) -> None:
    given = {"key": KEPT[name], "list": [KEPT[name]], "beside": beside}
    assert first_unstorable(given, "info") is None
    again = decode_json(encode_json(given))
    assert again["key"] == KEPT[name]
    assert again["list"] == [KEPT[name]]
    assert type(again["key"]) in (type(None), bool, int, float, str, dict)


def test_nan_comes_back_as_nan() -> None:
    for value in (math.nan, np.float64("nan")):
        assert first_unstorable([value], "info") is None
        assert math.isnan(decode_json(encode_json([value]))[0])


def test_tuples_come_back_as_lists_and_are_named() -> None:
    given = {"moves": ((1, 2), [Pair(3, 4)]), "text": "a"}
    assert first_unstorable(given, "info") is None
    assert decode_json(encode_json(given)) == {"moves": [[1, 2], [[3, 4]]], "text": "a"}
    assert decode_json(encode_json([*given.values(), math.nan]))[0] == [[1, 2], [[3, 4]]]
    assert list(tuples_in(given, "info")) == ["info['moves']", "info['moves'][0]", "info['moves'][1][0]"]


def test_value_that_holds_itself_is_refused() -> None:
    ring: dict[str, Any] = {"a": []}
    ring["a"].append(ring)
    assert "info['a'][0] is of type dict that contains itself" in (first_unstorable(ring, "info") or "")


def test_value_that_is_held_twice_is_kept() -> None:
    shared = [1]
    assert first_unstorable({"a": shared, "b": [shared, shared]}, "info") is None


@pytest.mark.parametrize("depth", [MAX_DEPTH - 1, MAX_DEPTH + 1, 5000])
def test_depth_is_kept_to_a_limit(depth: int) -> None:
    nested: Any = "core"
    for _ in range(depth):
        nested = [nested]
    said = first_unstorable(nested, "info")
    if depth < MAX_DEPTH:
        assert said is None
        assert decode_json(encode_json(nested)) == nested
    else:
        assert f"nested more than {MAX_DEPTH} levels deep" in (said or "")


def drawn(dice: random.Random, depth: int = 0) -> Any:
    """A value with everything that an author might combine."""
    refused = [value for value, _, _ in REFUSED.values() if not isinstance(value, types.GeneratorType)]
    leaves = [*KEPT.values(), *refused]
    kind = dice.randrange(5) if depth < 4 else 0
    if kind <= 1:
        return dice.choice(leaves)
    if kind == 2:
        return [drawn(dice, depth + 1) for _ in range(dice.randrange(4))]
    if kind == 3:
        return {f"k{number}": drawn(dice, depth + 1) for number in range(dice.randrange(4))}
    return dict.fromkeys(dice.choice([["a"], ["b", "c"], [1], [None]]), drawn(dice, depth + 1))


@pytest.mark.parametrize("seed", range(40))
def test_random_value_is_refused_or_comes_back_equal(seed: int) -> None:
    dice = random.Random(seed)
    for value in (drawn(dice) for _ in range(50)):
        if first_unstorable(value, "info") is None:
            assert decode_json(encode_json(value)) == value


# --- the fields of an author's own class


@dataclasses.dataclass(frozen=True)
class Case(Task):
    moves: tuple[int, ...] = ()
    when: datetime.date | None = None
    where: pathlib.Path = pathlib.Path()
    color: Color = Color.RED
    point: Point | None = None
    model: Model | None = None
    price: decimal.Decimal = decimal.Decimal(0)
    words: frozenset[str] = frozenset()
    data: bytes = b""
    anything: Any = None


def test_field_that_its_type_makes_again_is_kept() -> None:
    case = Case(
        "a",
        moves=(1, 2),
        when=datetime.date(2026, 1, 2),
        where=pathlib.Path("x/y"),
        point=Point(1, 2),
        model=Model(x=3),
        price=decimal.Decimal("1.10"),
        words=frozenset({"b", "a"}),
        data=b"ascii",
        anything={"a": [1]},
    )
    assert TaskCheck().problem(case) is None


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"data": b"\xff"}, "data is of type bytes"),
        ({"anything": {"a"}}, "anything is of type set"),
        ({"anything": [Point(1, 2)]}, r"anything[0] is of type"),
        ({"info": {"when": datetime.date(2026, 1, 2)}}, "info['when'] is of type datetime.date"),
        ({"prompt": [{"role": "user", "content": "a", "seen": {1}}]}, "prompt[0]['seen'] is of type set"),
    ],
)
def test_field_that_would_come_back_otherwise_is_refused(fields: dict[str, Any], said: str) -> None:
    assert said in (TaskCheck().problem(Case("a", **fields)) or "")


def test_field_of_arrays_is_refused_whatever_comparing_does() -> None:
    @dataclasses.dataclass(frozen=True)
    class Board(Task):
        board: Any = None
        grid: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(2))

    check = TaskCheck()
    assert "grid is of type numpy.ndarray" in (check.problem(Board("a")) or "")
    for value in itertools.chain([np.zeros((2, 2)), torch.zeros(3)]):
        assert "board is of type" in (check.problem(Board("a", board=value)) or "")
