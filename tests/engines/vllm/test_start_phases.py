"""The phases of an engine's start, as its worker records them."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runner.engines.vllm.engine import VllmEngine
from runner.engines.vllm.start import EngineFolder, VllmProcess, contained_vllm
from runner.engines.vllm.worker import start_phases
from runner.engines.vllm.worker.start_phases import PHASES, patch_start_phases, read_phase
from runner.models import ResolvedModel

MODULE = "vllm.v1.worker.worker_base"


class Worker:
    def load_model(self) -> str:
        return "loaded"

    def determine_available_memory(self) -> int:
        return 7

    def compile_or_warm_up_model(self) -> None: ...

    def execute(self) -> str:
        return "a step"


def wrapper() -> type[Any]:
    """A class such as vLLM's `WorkerWrapperBase`."""

    class WorkerWrapperBase:
        worker = Worker()

        def __getattr__(self, name: str) -> Any:
            return getattr(self.worker, name)

    return WorkerWrapperBase


@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
def test_each_phase_of_a_worker_is_noted(gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, path = wrapper(), tmp_path / "phase"
    monkeypatch.setitem(sys.modules, MODULE, SimpleNamespace(WorkerWrapperBase=kind))
    monkeypatch.setattr(start_phases, "_on_gpu", lambda: gpu)
    patch_start_phases(path)
    patch_start_phases(path)
    worker = kind()
    assert read_phase(path) == ""
    assert worker.load_model() == "loaded"
    assert read_phase(path) == "loading the weights"
    assert worker.determine_available_memory() == 7
    assert read_phase(path) == ("compiling and measuring memory" if gpu else "measuring memory")
    worker.compile_or_warm_up_model()
    assert read_phase(path) == ("warming up and capturing CUDA graphs" if gpu else "warming up")
    assert worker.execute() == "a step"
    assert read_phase(path).startswith("warming up")


def test_a_worker_of_an_engine_that_is_gone_starts_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = wrapper()
    monkeypatch.setitem(sys.modules, MODULE, SimpleNamespace(WorkerWrapperBase=kind))
    monkeypatch.setattr(start_phases, "_on_gpu", lambda: False)
    patch_start_phases(tmp_path / "gone" / "phase")
    assert kind().load_model() == "loaded"


def test_before_the_worker_of_vllm_is_imported_nothing_is_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    patch_start_phases(tmp_path / "phase")
    assert MODULE not in sys.modules


def test_engine_has_a_phase_only_while_it_starts(tmp_path: Path) -> None:
    engine = VllmEngine("nothing")
    assert engine.start_phase == ""
    process = VllmProcess(ResolvedModel("nothing", "nothing", tmp_path), {})
    engine._starting = process
    assert engine.start_phase == "importing vLLM"
    process.settings = SimpleNamespace()  # type: ignore[assignment]  # vLLM was imported
    process.folder = EngineFolder()
    assert engine.start_phase == "starting its processes"
    process.folder.phase.write_text("loading the weights")
    assert engine.start_phase == "loading the weights"
    process.folder.remove()


@pytest.mark.engine
def test_unpatched_start_reports_only_a_connection_and_its_end() -> None:
    with contained_vllm():
        from vllm.v1.engine.utils import CoreEngineState

    states = set(CoreEngineState.__members__)
    assert states == {"NEW", "CONNECTED", "READY"}, "if the new state is a phase of the start, remove the patch"


@pytest.mark.engine
def test_phases_reach_the_worker_of_this_vllm_by_its_wrapper() -> None:
    with contained_vllm():
        from vllm.v1.worker.worker_base import WorkerWrapperBase

    assert "__getattr__" in vars(WorkerWrapperBase)
    assert PHASES.keys().isdisjoint(vars(WorkerWrapperBase)), "the wrapper would hide the phases"
