"""Every benchmark runs through, in sizes at which its figures mean nothing."""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from runner import VllmEngine
from runner.engines.vllm.parallel import BINDING
from runner.sandbox.containers import ENGINE_VARIABLE
from tests import sweeps
from tests.benchmarks import verifiers
from tests.benchmarks.__main__ import NAMES
from tests.benchmarks.figures import Figure
from tests.cluster.ray_cluster import require_ray
from tests.sandbox.engines import engine_or_reason

pytestmark = pytest.mark.slow

SMALL: dict[str, dict[str, Any]] = {
    "start": {"ROUNDS": 1},
    "parts": {"ROUNDS": 1, "TIMES": 2},
    "fixup": {"ROUNDS": 1, "TIMES": 1, "EPISODES": 2, "LENGTHS": {"1k": 1_000, "10k": 1_500, "125k": 2_000}},
    "masks": {"ROUNDS": 1, "LINES": 1, "FORMATS": ("raw strings",)},
    "deltas": {"ROUNDS": 1, "TIMES": 1, "LONG": 1_000, "FORMATS": ("JSON object", "raw strings")},
    "kit": {"ROUNDS": 1},
    "interop": {"ROUNDS": 1, "TURNS": 2, "FILE_BYTES": 1 << 20, "GROUP_ROWS": 32},
    "scripted": {"ROUNDS": 1, "TURNS": 1},
    "turns": {"ROUNDS": 1, "EPISODES": 4},
    "turn_cost": {"ROUNDS": 1, "EPISODES": 4, "WIDTHS": (2,), "STEP_SECONDS": 0.001},
    "together": {"ROUNDS": 1, "WIDTHS": (2,), "TURNS": 2, "TOKENS": 4, "STEP_SECONDS": 0.001},
    "live": {"EPISODES": 8, "SPOKEN": 20, "TICK": 0.01, "SECONDS": 0.05},
    "streams": {"ROUNDS": 1, "STREAMS": 4, "STEPS": 10},
    "fleet": {"ROUNDS": 1, "EPISODES": 4, "WAITING_EPISODES": 4, "WORKERS": 2, "WAIT": 1},
    "losses": {"ROUNDS": 1, "MACHINES": 1},
    "engine_process": {"ROUNDS": 1, "STREAMS": 2, "LENGTH": 5},
    "fleet_weights": {"ROUNDS": 1, "LAYERS": 1},
    "endpoint": {"ROUNDS": 1, "ALONE": 3, "STREAMS": 4, "SHORT": 2, "LONG": 5, "SPREAD": 0.1, "TURNS": 9, "LAST": 2},
    "parity": {"ROUNDS": 1, "EPISODES": 2, "TURNS": 2, "WORDS": "one two three"},
    "ranks": {"EPISODES": 4, "TURNS": 2, "PLACES": 2, "WORDS": "one two three"},
    "proofs": {
        "ROUNDS": 1,
        "SEQUENCES": 2,
        "LENGTH": 16,
        "SAMPLED": 4,
        "LARGE": {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2},
        "LARGE_BYTES": 1,
    },
    "verifiers": {"ROUNDS": 1, "EPISODES": 2, "TURNS": 2, "TOKENS": 16},
    "trainers": {"ROUNDS": 1, "EPISODES": 8, "REPEATS": 2, "CALLS": 10},
    "sandboxes": {"ROUNDS": 1, "CALLS": 1, "SANDBOXES": 1, "LAG_SANDBOXES": 1},
}


VLLM = ("streams", "turn_cost", "together", "parity", "ranks", "proofs", "verifiers")
"""Benchmarks that load vLLM."""
RAY = ("fleet", "losses", "engine_process", "fleet_weights")
"""Benchmarks that start workers."""
CONTAINERS = ("sandboxes",)
"""Benchmarks that start containers."""


def for_each_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cores that this process was given for one worker, for each of two."""
    if cores := os.environ.get(BINDING):
        monkeypatch.setenv(BINDING, f"{cores}|{cores}")


def small(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = importlib.import_module(f"tests.benchmarks.{name}")
    for constant, value in SMALL[name].items():
        monkeypatch.setattr(module, constant, value)
    if hasattr(module, "on_one_core"):  # the tests that follow may have all of them
        monkeypatch.setattr(module, "on_one_core", lambda: None)
    return module


def assert_measured(figures: Iterable[Figure]) -> None:
    measured = list(figures)
    assert measured
    for figure in measured:
        assert figure.values
        assert all(map(math.isfinite, figure.values)), figure


def test_none_is_left_out() -> None:
    files = Path(__file__).parent.glob("*.py")
    with_measures = {file.stem for file in files if "\ndef measure()" in file.read_text(encoding="utf-8")}
    assert set(SMALL) == set(NAMES) == with_measures


@pytest.mark.parametrize("name", sweeps.part([name for name in NAMES if name not in (*VLLM, *RAY, *CONTAINERS)], 3))
def test_a_benchmark_runs_through(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_measured(small(name, monkeypatch).measure())


@pytest.mark.whole
@pytest.mark.parametrize("name", CONTAINERS)
def test_a_benchmark_of_containers_runs_through(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, reason = engine_or_reason()
    if not engine:
        pytest.skip(reason)
    monkeypatch.setenv(ENGINE_VARIABLE, engine)
    assert_measured(small(name, monkeypatch).measure())


@pytest.mark.ray
@pytest.mark.whole
@pytest.mark.parametrize("name", RAY)
def test_a_benchmark_of_workers_runs_through(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    require_ray()
    assert_measured(small(name, monkeypatch).measure())


@pytest.mark.engine
@pytest.mark.in_turns("benchmarks of vLLM")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch's own parts, by torch
@pytest.mark.parametrize(
    "name",
    [VLLM[0], *(pytest.param(name, marks=pytest.mark.whole) for name in VLLM[1:])],
)
def test_a_benchmark_of_vllm_runs_through(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "ranks":
        for_each_worker(monkeypatch)
    if name == "verifiers":  # a test installs nothing, and plays with what is there
        monkeypatch.setattr(verifiers, "install", lambda: verifiers.PEER.missing)
    assert_measured(small(name, monkeypatch).measure())


@pytest.mark.anyio
@pytest.mark.in_turns("benchmarks of vLLM")
async def test_run_and_vllm_are_compared_on_an_engine_that_is_there(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = small("parity", monkeypatch)
    assert_measured(module.figures(*await module.rounds(engine)))
