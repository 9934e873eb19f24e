"""Every benchmark runs to its end, in sizes that are too small for meaningful figures."""

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
    "start": {"ROUND_COUNT": 1},
    "parts": {"ROUND_COUNT": 1, "REPEAT_COUNT": 2},
    "fixup": {
        "ROUND_COUNT": 1,
        "REPEAT_COUNT": 1,
        "EPISODE_COUNT": 2,
        "LENGTHS": {"1k": 1_000, "10k": 1_500, "125k": 2_000},
    },
    "masks": {"ROUND_COUNT": 1, "CODE_REPEAT_COUNT": 1, "FORMATS": ("raw strings",)},
    "deltas": {
        "ROUND_COUNT": 1,
        "REPEAT_COUNT": 1,
        "LONG_CALL_CHARS": 1_000,
        "FORMATS": ("JSON object", "raw strings"),
    },
    "kit": {"ROUND_COUNT": 1},
    "interop": {"ROUND_COUNT": 1, "TURN_COUNT": 2, "FILE_BYTES": 1 << 20, "GROUP_ROWS": 32},
    "scripted": {"ROUND_COUNT": 1, "TURN_COUNT": 1},
    "turns": {"ROUND_COUNT": 1, "EPISODE_COUNT": 4},
    "turn_cost": {"ROUND_COUNT": 1, "EPISODE_COUNT": 4, "WIDTHS": (2,), "STEP_SECONDS": 0.001},
    "together": {"ROUND_COUNT": 1, "WIDTHS": (2,), "TURN_COUNT": 2, "TURN_TOKENS": 4, "STEP_SECONDS": 0.001},
    "live": {"EPISODE_COUNT": 8, "REPLY_CHARS": 20, "TICK_SECONDS": 0.01, "MEASURED_SECONDS": 0.05},
    "streams": {"ROUND_COUNT": 1, "STREAM_COUNT": 4, "STEP_COUNT": 10},
    "fleet": {
        "ROUND_COUNT": 1,
        "EPISODE_COUNT": 4,
        "WAITING_EPISODE_COUNT": 4,
        "WORKER_COUNT": 2,
        "FIRST_ID_TICK_COUNT": 1,
    },
    "losses": {"WORKER_KILL_COUNT": 1, "MACHINE_KILL_COUNT": 1},
    "engine_process": {"ROUND_COUNT": 1, "STREAM_COUNT": 2, "STREAM_IDS": 5},
    "fleet_weights": {"ROUND_COUNT": 1, "LAYERS": 1},
    "endpoint": {
        "ROUND_COUNT": 1,
        "SEQUENTIAL_TURN_COUNT": 3,
        "STREAM_COUNT": 4,
        "SHORT_STREAM_IDS": 2,
        "LONG_STREAM_IDS": 5,
        "START_SPREAD_SECONDS": 0.1,
        "HISTORY_TURN_COUNT": 9,
        "MEASURED_TURN_COUNT": 2,
    },
    "parity": {"ROUND_COUNT": 1, "EPISODE_COUNT": 2, "TURN_COUNT": 2, "WORDS": "one two three"},
    "ranks": {"EPISODE_COUNT": 4, "TURN_COUNT": 2, "PLACE_COUNT": 2, "WORDS": "one two three"},
    "proofs": {
        "ROUND_COUNT": 1,
        "SEQUENCE_COUNT": 2,
        "PROOF_LENGTH": 16,
        "SAMPLED_TOKENS": 4,
        "LARGE": {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2},
        "LARGE_BYTES": 1,
    },
    "verifiers": {"ROUND_COUNT": 1, "EPISODE_COUNT": 2, "TURN_COUNT": 2, "TURN_TOKENS": 16},
    "trainers": {"ROUND_COUNT": 1, "EPISODE_COUNT": 8, "REPEAT_COUNT": 2, "CALL_COUNT": 10},
    "sandboxes": {"ROUND_COUNT": 1, "CALL_COUNT": 1, "SANDBOX_COUNT": 1, "LAG_SANDBOX_COUNT": 1},
}


VLLM = ("streams", "turn_cost", "together", "parity", "ranks", "proofs", "verifiers")
"""Benchmarks that load vLLM."""
RAY = ("fleet", "losses", "engine_process", "fleet_weights")
"""Benchmarks that start workers."""
CONTAINERS = ("sandboxes",)
"""Benchmarks that start containers."""


def for_each_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let each of two workers use the cores that were set for one worker of this process."""
    if cores := os.environ.get(BINDING):
        monkeypatch.setenv(BINDING, f"{cores}|{cores}")


def small(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = importlib.import_module(f"tests.benchmarks.{name}")
    for constant, value in SMALL[name].items():
        monkeypatch.setattr(module, constant, value)
    if hasattr(module, "on_one_core"):  # later tests may use all cores
        monkeypatch.setattr(module, "on_one_core", lambda: None)
    return module


def assert_measured(figures: Iterable[Figure]) -> None:
    measured = list(figures)
    assert measured
    for figure in measured:
        assert figure.values
        assert all(map(math.isfinite, figure.values)), figure


def test_every_benchmark_has_a_small_case() -> None:
    files = Path(__file__).parent.glob("*.py")
    with_measures = {file.stem for file in files if "\ndef measure()" in file.read_text(encoding="utf-8")}
    assert set(SMALL) == set(NAMES) == with_measures


@pytest.mark.sample_cases(4)
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
@pytest.mark.sample_units("benchmarks of vLLM")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by torch in its own code
@pytest.mark.parametrize(
    "name",
    [VLLM[0], *(pytest.param(name, marks=pytest.mark.whole) for name in VLLM[1:])],
)
def test_a_benchmark_of_vllm_runs_through(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "ranks":
        for_each_worker(monkeypatch)
    if name == "verifiers":  # a test installs nothing, and uses what is installed
        monkeypatch.setattr(verifiers, "install", lambda: verifiers.PEER.missing)
    assert_measured(small(name, monkeypatch).measure())


@pytest.mark.anyio
@pytest.mark.sample_units("benchmarks of vLLM")
async def test_run_and_vllm_are_compared_on_an_engine_that_is_there(
    engine: VllmEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = small("parity", monkeypatch)
    assert_measured(module.figures(*await module.rounds(engine)))
