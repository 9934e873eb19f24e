"""The dtype in which an engine on a CPU computes if no dtype is given."""

import json
import logging
import os
import platform
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from runner.engines.vllm.dtypes import (
    ChosenDtype,
    choose_dtype,
    emulates_bfloat16,
    gives_dtype,
    machine_memory,
    weight_bytes,
)
from runner.engines.vllm.engine import VllmEngine
from runner.engines.vllm.parallel import BINDING, UNIPROC, single_process_variables
from runner.engines.vllm.settings import choose_settings

KNOWN = frozenset({"dtype", "distributed_executor_backend", "tensor_parallel_size", "data_parallel_size"})
MODERN = frozenset({"bfloat16", "float32"})  # AVX-512 with bfloat16
OLD = frozenset({"float32"})  # AVX2, and AVX-512 without bfloat16
NEWEST = frozenset({"bfloat16", "float16", "float32"})  # AMX with float16
GIGABYTE_BYTES = 1_000_000_000


def model(folder: Path, size: int = 0, **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if size:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": size}}))
    return folder


def chosen(folder: Path, fast: frozenset[str], memory: int = 16 * GIGABYTE_BYTES, **given: Any) -> ChosenDtype:
    return choose_dtype(folder, given, is_fast=fast.__contains__, memory=memory)


@pytest.mark.parametrize(
    ("stored", "fast", "name"),
    [
        ("bfloat16", MODERN, "auto"),
        ("bfloat16", OLD, "float32"),
        ("float32", MODERN, "auto"),  # vLLM resolves it to bfloat16
        ("float32", OLD, "float32"),
        ("float16", NEWEST, "auto"),
        ("float16", MODERN, "bfloat16"),
        ("float16", OLD, "float32"),
        (None, MODERN, "auto"),
        (None, OLD, "float32"),
    ],
)
@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_a_cpu_takes_its_fastest_dtype(
    key: str, stored: str | None, fast: frozenset[str], name: str, tmp_path: Path
) -> None:
    config: dict[str, Any] = {key: stored}
    found = chosen(model(tmp_path, **config), fast)
    assert found.name == name
    assert ("is fast on this processor" in found.why) == (name == "auto")


def test_dtype_of_a_nested_text_model_is_read(tmp_path: Path) -> None:
    assert chosen(model(tmp_path, text_config={"dtype": "float16"}), MODERN).name == "bfloat16"


@pytest.mark.parametrize(
    "config",
    [
        {"torch_dtype": "half"},
        {"torch_dtype": "torch.float16"},
        {"dtype": {"text_config": "float16", "vision_config": "float32"}},
        {"dtype": {"": "float16"}},
        {"language_config": {"torch_dtype": "float16"}},
        {"vision_config": {"dtype": "bfloat16"}, "llm_config": {"dtype": "float16"}},
        {"thinker_config": {"audio_config": {"dtype": "bfloat16"}, "text_config": {"dtype": "float16"}}},
    ],
    ids=str,
)
def test_dtype_is_found_wherever_models_write_it(config: dict[str, Any], tmp_path: Path) -> None:
    assert chosen(model(tmp_path, **config), MODERN).name == "bfloat16"


def test_a_folder_without_a_config_is_left_to_vllm_on_a_fast_cpu(tmp_path: Path) -> None:
    assert chosen(tmp_path, MODERN).name == "auto"


@pytest.mark.parametrize(
    ("config", "given"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, {}),
        ({"llm_config": {"quantization_config": {"quant_method": "awq"}}}, {}),
        ({}, {"quantization": "gptq"}),
    ],
    ids=["checkpoint", "nested", "argument"],
)
def test_quantized_weights_keep_vllms_choice(config: dict[str, Any], given: dict[str, Any], tmp_path: Path) -> None:
    assert chosen(model(tmp_path, dtype="bfloat16", **config), OLD, **given) == ChosenDtype()


def test_float32_that_does_not_fit_in_memory_is_not_taken(tmp_path: Path) -> None:
    folder = model(tmp_path, size=9 * GIGABYTE_BYTES, dtype="bfloat16")
    found = chosen(folder, OLD, memory=16 * GIGABYTE_BYTES)
    assert found.name == "auto"
    assert "float32 would need 18 GB" in found.why
    assert chosen(folder, OLD, memory=18 * GIGABYTE_BYTES).name == "float32"
    two = choose_dtype(folder, {}, is_fast=OLD.__contains__, memory=18 * GIGABYTE_BYTES, copies=2)
    assert "36 GB" in two.why


@pytest.mark.parametrize("name", ["hf_quant_config.json", "model-Q4_K_M.gguf"])
def test_quantized_files_keep_vllms_choice(name: str, tmp_path: Path) -> None:
    (tmp_path / name).touch()
    assert chosen(model(tmp_path, dtype="bfloat16"), OLD) == ChosenDtype()


def test_memory_is_that_of_the_container(tmp_path: Path) -> None:
    whole = machine_memory(tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    assert machine_memory(tmp_path) == whole
    (tmp_path / "memory.max").write_text(f"{whole // 2}\n")
    assert machine_memory(tmp_path) == whole // 2
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text(f"{whole // 4}\n")
    assert machine_memory(tmp_path) == whole // 4


@pytest.mark.parametrize(
    ("sizes", "total"),
    [
        ({"pytorch_model-00001-of-00002.bin": 70, "pytorch_model-00002-of-00002.bin": 30, "training_args.bin": 9}, 100),
        ({"model.safetensors": 100, "consolidated.safetensors": 100}, 100),
        ({"consolidated.safetensors": 100}, 100),
        ({"model.safetensors": 100, "pytorch_model.bin": 100}, 100),
    ],
)
def test_size_of_weights_is_that_of_one_copy(sizes: dict[str, int], total: int, tmp_path: Path) -> None:
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(bytes(size))
    assert weight_bytes(tmp_path) == total


def test_size_of_weights_without_an_index_is_that_of_their_files(tmp_path: Path) -> None:
    assert weight_bytes(tmp_path) == 0
    (tmp_path / "model.safetensors").write_bytes(bytes(100))
    assert weight_bytes(tmp_path) == 100


@pytest.mark.parametrize("given", ["bfloat16", "half", "float16", "float", "float32"])
def test_an_explicit_dtype_wins(given: str) -> None:
    assert gives_dtype({"dtype": given})
    settings = choose_settings({"dtype": given}, cpu=True, known=KNOWN, dtype="float32")
    assert settings.arguments["dtype"] == given
    assert "dtype" not in settings.chosen


@pytest.mark.parametrize("given", [{}, {"dtype": "auto"}], ids=["nothing", "auto"])
def test_the_chosen_dtype_is_recorded_as_chosen(given: dict[str, Any]) -> None:
    assert not gives_dtype(given)
    settings = choose_settings(given, cpu=True, known=KNOWN, dtype="float32")
    assert settings.arguments["dtype"] == settings.chosen["dtype"] == "float32"


def test_a_gpu_engine_is_given_no_dtype_and_no_executor() -> None:
    settings = choose_settings({}, cpu=False, known=KNOWN)
    assert settings.arguments.keys().isdisjoint({"dtype", "distributed_executor_backend"})


SKYLAKE = {"architecture": "x86_64", "avx2": True, "avx512_f": True}
ICE_LAKE = {**SKYLAKE, "avx512_vnni": True, "avx512_bf16": False, "amx_bf16": False}
ZEN_4 = {**ICE_LAKE, "avx512_bf16": True}
SAPPHIRE_RAPIDS = {**ZEN_4, "amx_bf16": True}
ARROW_LAKE = {"architecture": "x86_64", "avx2": True, "avx512_f": False, "avx_ne_convert": True}
GRACE = {"architecture": "aarch64", "neon": True, "bf16": True}


@pytest.mark.parametrize(
    ("processor", "limit", "emulates"),
    [
        (SKYLAKE, "", True),
        (ICE_LAKE, "", True),
        (ZEN_4, "", False),
        (ZEN_4, "AVX512_CORE_BF16", False),
        (ZEN_4, "AVX512_CORE", True),
        (ZEN_4, "avx512_core_vnni", True),
        (SAPPHIRE_RAPIDS, "", False),
        (SAPPHIRE_RAPIDS, "AVX512_CORE_VNNI", True),
        (ARROW_LAKE, "", False),
        (GRACE, "", False),
        (GRACE, "AVX512_CORE", False),
    ],
)
def test_avx512_without_bfloat16_emulates_it(processor: dict[str, Any], limit: str, *, emulates: bool) -> None:
    assert emulates_bfloat16(processor, limit) is emulates


ON_X86 = pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="oneDNN has no limit here")


@pytest.mark.sample_cases(3)
@pytest.mark.parametrize(
    "isa",
    [pytest.param("AVX2", marks=ON_X86), pytest.param("AVX512_CORE", marks=ON_X86), None],
    ids=["AVX2", "AVX-512", "this processor"],
)
def test_onednn_is_asked_for_this_processor(isa: str | None) -> None:
    script = (
        "from runner.engines.vllm.dtypes import is_fast; import torch;"
        "print(is_fast('bfloat16'), is_fast('float32'), bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()))"
    )
    environment = {**os.environ, **({} if isa is None else {"ONEDNN_MAX_CPU_ISA": isa})}
    command = [sys.executable, "-c", script]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=600)
    half, full, supported = said.stdout.split()
    assert full == "True"
    flags = set(Path("/proc/cpuinfo").read_text().split())
    if isa is not None:
        assert half == "False"
    elif "avx512f" in flags:
        assert half == str(not flags.isdisjoint({"avx512_bf16", "amx_bf16"}))
    else:
        assert half == supported


def test_the_package_and_the_engine_are_imported_without_torch() -> None:
    script = "import sys, runner.engines.vllm.engine, runner; runner.VllmEngine; print('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=600)
    assert said.stdout == "False\n"


# --- the choice in an engine's notes


class StartedProcess:
    """Stand-in for the process of vLLM, which has chosen a dtype."""

    dtype_reason = "bfloat16 is slow on this processor"

    def __init__(self, *_: object, **__: object) -> None:
        pass

    async def start(self) -> Any:
        return SimpleNamespace(vllm_config=SimpleNamespace(model_config=SimpleNamespace(dtype="torch.float32")))


@pytest.mark.anyio
@pytest.mark.asyncio_alone
async def test_chosen_dtype_is_in_the_log_of_deltarunner(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def take_control(*_: object) -> None:
        pass

    engine_module = "runner.engines.vllm.engine"
    monkeypatch.setattr(f"{engine_module}.VllmProcess", StartedProcess)
    monkeypatch.setattr(f"{engine_module}.require_vllm", lambda: None)
    monkeypatch.setattr(f"{engine_module}.resolve_sent", lambda *_: None)
    monkeypatch.setattr(f"{engine_module}.load_language", lambda *_: (None, None, ()))
    monkeypatch.setattr(VllmEngine, "_take_control", take_control)
    caplog.set_level(logging.INFO, "deltarunner.engines")
    engine = await VllmEngine("nothing").__aenter__()
    note = "computing in float32: bfloat16 is slow on this processor"
    assert engine.notes == (note,)
    assert caplog.record_tuples == [("deltarunner.engines", logging.INFO, note)]


# --- a run that is resumed


@pytest.mark.parametrize(
    ("described", "kept"),
    [
        ({"kind": "vllm", "dtype": "bfloat16"}, "bfloat16"),
        ({"kind": "vllm"}, "auto"),  # begun before run files contained the dtype
        ({"kind": "scripted"}, None),
    ],
    ids=["written down", "older file", "another engine"],
)
def test_an_engine_keeps_the_dtype_of_a_run_that_is_resumed(described: dict[str, Any], kept: str | None) -> None:
    engine = VllmEngine("nothing")
    engine.restore_choices(described)
    assert engine._kept_dtype == kept
    assert engine.__getstate__()["_kept_dtype"] == kept, "workers get the dtype too"


# --- the worker inside the engine core


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (BINDING, "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 0, 1})


def test_single_cpu_worker_runs_inside_the_engine_core() -> None:
    settings = choose_settings({}, cpu=True, known=KNOWN)
    assert settings.arguments["distributed_executor_backend"] == UNIPROC
    assert settings.environment["OMP_NUM_THREADS"] == "3"
    assert settings.environment["OMP_PLACES"] == "{0,1,2}"
    assert settings.environment["OMP_PROC_BIND"] == "true"


def test_threads_are_bound_to_the_cores_that_the_user_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BINDING, "4-6,9")
    assert single_process_variables({})["OMP_PLACES"] == "{4,5,6,9}"


@pytest.mark.parametrize(
    "given",
    [
        {"tensor_parallel_size": 2},
        {"data_parallel_size": 2},
        {"distributed_executor_backend": "mp"},
        {"distributed_executor_backend": "ray"},
        {"nnodes": 2},
    ],
    ids=str,
)
def test_other_workers_are_processes_of_their_own(given: dict[str, Any]) -> None:
    settings = choose_settings(given, cpu=True, known=KNOWN | {"nnodes"})
    assert settings.arguments.get("distributed_executor_backend") == given.get("distributed_executor_backend")
    assert not settings.environment.keys() & {"OMP_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND"}


@pytest.mark.parametrize("bound", ["auto", "nobind", "0|1"])
def test_cores_that_are_left_to_vllm_leave_it_the_executor(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BINDING, bound)
    assert single_process_variables({}) == {}


@pytest.mark.parametrize("library", ["libiomp5.so", "libomp.so.5"])
def test_another_openmp_leaves_vllm_the_executor(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", f"/usr/lib/{library}")
    assert single_process_variables({}) == {}


def test_worker_is_in_the_core_with_the_openmp_that_vllm_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", "/vllm/libs/libtcmalloc_minimal-1.so:/torch/lib/libgomp.so.1")
    assert single_process_variables({})["OMP_PLACES"] == "{0,1,2}"
