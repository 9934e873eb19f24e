"""New weights compared with the model's, without an engine: errors name the tensor and the file that do not fit."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import anyio.to_thread
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from runner.engines.vllm.settings import choose_settings
from runner.engines.vllm.weight_loading import VllmWeights
from runner.engines.vllm.worker.extension import WeightWorker
from runner.engines.weights import FLOATS
from runner.errors import BadWeights, EngineError
from tests.engines.small_weights import (
    EMBEDDING,
    NORM,
    OURS,
    UP,
    Llm,
    Tensors,
    llm_of,
    load,
    same,
    saved,
    tensors,
    without,
)
from tests.engines.vllm.memories import open_memories

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # required by vLLM


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The folder from which an engine was started."""
    return saved(tmp_path / "the model", tensors())


@pytest.fixture
async def weights(model: Path) -> AsyncIterator[VllmWeights]:
    """Loader of new weights for the model."""
    yield VllmWeights(Llm(model), "the model")
    gc.collect()
    assert list(open_memories()) == [], "every state dict was freed"


def cut(folder: Path, size: int) -> Path:
    file = saved(folder, tensors()) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    return folder


def written(folder: Path, content: bytes) -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(content)
    return folder


def beside(folder: Path) -> Path:
    folder.mkdir()
    (folder / "pytorch_model.bin").touch()
    return folder


def index_of(file: str) -> dict[str, str]:
    return dict.fromkeys(tensors(), file)


MISFITS: dict[str, tuple[Callable[[Path], Any], list[str]]] = {
    "a tensor is missing": (lambda folder: saved(folder, without(UP)), [repr(UP), "missing"]),
    "a tensor too many": (
        lambda folder: saved(folder, {**tensors(), "lm_head.weight": torch.ones(6, 4)}),
        ["'lm_head.weight' in model.safetensors", "no tensor of the model"],
    ),
    "another shape": (
        lambda folder: saved(folder, without(UP), {UP: torch.ones(4, 2)}),
        [f"{UP!r} in model-1.safetensors", "(4, 2)", "(2, 4)"],
    ),
    "no float": (
        lambda folder: saved(folder, {**tensors(), NORM: torch.ones(4, dtype=torch.int8)}),
        [f"{NORM!r} in model.safetensors", "int8", "bfloat16"],
    ),
    "another kind of integer": (
        lambda folder: saved(folder, {**tensors(), "table": torch.arange(3, dtype=torch.int32)}),
        ["'table' in model.safetensors", "int32", "int64"],
    ),
    "a prefix before every name": (
        lambda folder: saved(folder, {f"module.{name}": tensor for name, tensor in tensors().items()}),
        ["'module.table' in model.safetensors", "Take 'module.' off"],
    ),
    "a wrapper inside of every name": (
        lambda folder: {name.replace(".", "._fsdp_wrapped_module.", 1): value for name, value in tensors().items()},
        ["Take '_fsdp_wrapped_module.' out of every name"],
    ),
    "a compiled module inside of a name": (
        lambda folder: {**without(UP), UP.replace("mlp.", "mlp._orig_mod."): tensors()[UP]},
        [f"missing {UP!r}", "Take '_orig_mod.' out of every name"],
    ),
    "an adapter that is not merged": (
        lambda folder: {
            **without(UP),
            f"base_model.model.{UP.replace('.weight', '.base_layer.weight')}": tensors()[UP],
            f"base_model.model.{UP.replace('.weight', '.lora_A.default.weight')}": torch.ones(1, 4),
        },
        [f"missing {UP!r}", "merge_and_unload()", "add_adapter()"],
    ),
    "an empty shard": (lambda folder: {**tensors(), UP: torch.ones(0)}, [repr(UP), "(0,)", "gather the whole tensor"]),
    "a flat shard": (lambda folder: {**tensors(), UP: torch.ones(4)}, [repr(UP), "(4,)", "gather the whole tensor"]),
    "pairs": (lambda folder: list(tensors().items()), ["are list", "Give dict(...)"]),
    "no folder": (lambda folder: folder, ["the folder of weights ", " does not exist"]),
    "a file": (lambda folder: saved(folder, tensors()) / "model.safetensors", ["give the folder that holds it"]),
    "an empty folder": (lambda folder: saved(folder), ["holds no *.safetensors"]),
    "a folder of another format": (beside, ["only pytorch_model.bin"]),
    "a truncated file": (lambda folder: cut(folder, -1), ["model.safetensors is truncated", "the tensor '"]),
    "a file cut off in its header": (lambda folder: cut(folder, 30), ["model.safetensors is truncated", "header"]),
    "an empty file": (lambda folder: written(folder, b""), ["model.safetensors is truncated"]),
    "no safetensors": (lambda folder: written(folder, b"PK" * 100), ["model.safetensors is not a safetensors"]),
    "a broken header": (
        lambda folder: written(folder, (4).to_bytes(8, "little") + b"{{{{"),
        ["model.safetensors cannot be read", "Save it again"],
    ),
    "a header of other things": (
        lambda folder: written(folder, (8).to_bytes(8, "little") + b'{"a": 1}'),
        ["model.safetensors cannot be read"],
    ),
    "a shard that the index names is missing": (
        lambda folder: saved(folder, tensors(), index=index_of("model-7.safetensors")),
        ["model-7.safetensors is missing", "'model.embed_tokens.weight'"],
    ),
    "a tensor that is not where the index says": (
        lambda folder: saved(folder, without(UP), index=index_of("model.safetensors")),
        ["model.safetensors has no tensor", repr(UP)],
    ),
    "a broken index": (
        lambda folder: saved(folder, tensors(), index={}) and written_index(folder, "[]"),
        ["model.safetensors.index.json cannot be read"],
    ),
    "a tensor twice": (lambda folder: saved(folder, tensors(), {NORM: torch.ones(4)}), [repr(NORM), "model-1"]),
    "a number": (lambda folder: 5, ["are int", "give a folder"]),
    "a module": (lambda folder: torch.nn.Linear(1, 1), ["are Linear", "model.state_dict()"]),
    "a state dict without a tensor": (lambda folder: without(UP), ["the state dict", "missing", repr(UP)]),
    "an empty state dict": (lambda folder: {}, ["the state dict", "missing", repr(EMBEDDING), "and 1 more"]),
    "a state dict of another shape": (
        lambda folder: {**tensors(), UP: torch.ones(2, 5)},
        ["the state dict", repr(UP), "(2, 5)"],
    ),
    "a state dict of another dtype": (
        lambda folder: {**tensors(), NORM: torch.ones(4, dtype=torch.bool)},
        ["the state dict", repr(NORM), "bool"],
    ),
    "a list in a state dict": (lambda folder: {**tensors(), NORM: [1.0] * 4}, [repr(NORM), "list", "give a tensor"]),
    "a number for a name": (lambda folder: {**tensors(), 1: torch.ones(1)}, ["key 1 is int"]),
    "a tensor without data": (
        lambda folder: {**tensors(), NORM: torch.ones(4, device="meta")},
        [repr(NORM), "no data"],
    ),
    "NaN": (
        lambda folder: {**tensors(), UP: torch.tensor([[0.0, 1, 2, 3], [4, 5, 6, float("nan")]])},
        [repr(UP), "NaN or infinite"],
    ),
    "NaN, in another order of bytes": (
        lambda folder: {**tensors(), NORM: np.full(4, np.nan, ">f4")},
        [repr(NORM), "NaN or infinite"],
    ),
    "infinity": (lambda folder: {**tensors(), NORM: np.full(4, -np.inf)}, [repr(NORM), "NaN or infinite"]),
    "a value that rounds to infinity": (
        lambda folder: {**tensors(), NORM: torch.full((4,), 1e300, dtype=torch.float64)},
        [repr(NORM), "too large for bfloat16"],
    ),
}


def written_index(folder: Path, text: str) -> Path:
    (folder / "model.safetensors.index.json").write_text(text)
    return folder


@pytest.mark.sample_cases(3)
@pytest.mark.parametrize(("make", "words"), MISFITS.values(), ids=MISFITS.keys())
async def test_unfit_weights_are_refused_by_name_without_asking_vllm(
    weights: VllmWeights, tmp_path: Path, make: Callable[[Path], Any], words: list[str]
) -> None:
    with pytest.raises(BadWeights) as refusal:
        await weights.check(make(tmp_path / "new"))
    message = str(refusal.value)
    assert [part for part in words if part not in message] == [], message
    assert "\n" not in message
    assert llm_of(weights).asked == []


@pytest.mark.parametrize("kind", [str, Path])
async def test_a_folder_is_loaded_whole_from_its_one_file_or_its_shards(
    weights: VllmWeights, tmp_path: Path, kind: Callable[[Path], Any]
) -> None:
    assert same(await load(weights, kind(saved(tmp_path / "one", tensors()))), tensors())
    rest = {UP: tensors()[UP]}
    assert same(await load(weights, kind(saved(tmp_path / "two", without(UP), rest))), tensors())


async def test_index_determines_which_files_are_loaded(weights: VllmWeights, tmp_path: Path) -> None:
    folder = saved(tmp_path / "new", tensors(), index=index_of("model.safetensors"))
    save_file({NORM: torch.zeros(4)}, folder / "another.safetensors")
    assert same(await load(weights, folder), tensors())


async def test_a_state_dict_arrives_as_it_was_on_the_way_in(weights: VllmWeights) -> None:
    given = tensors()
    given[EMBEDDING] = given[EMBEDDING].T.contiguous().T  # in another memory layout
    given[UP].requires_grad_()
    checked = await weights.check(given)
    with torch.no_grad():
        given[UP].zero_()  # as the next step of the trainer would change it
    await weights.load(checked)
    assert same(llm_of(weights).loaded, tensors())


@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.float16, np.float32])
async def test_floats_of_another_width_are_rounded_to_the_models(weights: VllmWeights, kind: Any) -> None:
    exact = {
        name: torch.rand(tensor.shape) if tensor.is_floating_point() else tensor for name, tensor in tensors().items()
    }
    given = {
        name: (tensor.numpy() if kind is np.float32 else tensor.to(kind)) if tensor.is_floating_point() else tensor
        for name, tensor in exact.items()
    }
    wanted = {
        name: torch.as_tensor(tensor).to(torch.bfloat16) if exact[name].is_floating_point() else exact[name]
        for name, tensor in given.items()
    }
    assert same(await load(weights, given), wanted)


async def test_tensor_that_the_model_keeps_in_float32_stays_float32(tmp_path: Path) -> None:
    model = saved(tmp_path / "the model", {NORM: torch.ones(4)})  # float32 weights in a bfloat16 engine
    weights = VllmWeights(Llm(model), "the model")
    assert (await load(weights, {NORM: torch.full((4,), 1 / 3)}))[NORM].dtype is torch.float32


async def test_empty_and_single_values_arrive(tmp_path: Path) -> None:
    given = {"empty": torch.ones(0, 3, dtype=torch.bfloat16), "scale": torch.tensor(2.5), "flag": torch.tensor([True])}
    weights = VllmWeights(Llm(saved(tmp_path / "the model", given)), "the model")
    assert same(await load(weights, given), given)


async def test_many_small_tensors_need_few_partial_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {f"model.layers.{number}.weight": torch.full((3,), float(number)) for number in range(1100)}
    calls, writev = [], os.writev

    def by_half(descriptor: int, parts: list[memoryview]) -> int:
        calls.append(len(parts))
        whole = b"".join(parts)
        return writev(descriptor, [whole[: max(1, len(whole) - 5)]])

    monkeypatch.setattr("os.writev", by_half)
    monkeypatch.setattr("runner.engines.vllm.shared_weights._MAX_PARTS", 500)
    weights = VllmWeights(Llm(saved(tmp_path / "the model", given)), "the model")
    assert same(await load(weights, given), given)
    assert calls[0] == 1, "only the header"
    assert len([count for count in calls if count >= 100]) == 3
    assert len(calls) < 40


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("at", ["first", "middle", "last"])
async def test_first_tensor_with_a_bad_value_is_named(
    value: float, at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {
        f"{dtype}.{number}": torch.ones(number, dtype=getattr(torch, dtype))
        for dtype in FLOATS
        for number in (0, 1, 5, 8)
    }
    names = [name for name in given if given[name].numel()]
    weights = VllmWeights(Llm(saved(tmp_path / "the model", given)), "the model")
    monkeypatch.setattr("runner.engines.vllm.shared_weights._BATCH_BYTES", 24)
    for name in names:
        bad = given[name].clone()
        bad[{"first": 0, "middle": len(bad) // 2, "last": -1}[at]] = value
        with pytest.raises(BadWeights, match=rf"{re.escape(name)}' holds a value that is NaN or infinite"):
            await weights.check({**given, name: bad})


async def test_tied_output_layer_is_optional_but_must_be_equal(model: Path, tmp_path: Path) -> None:
    weights = VllmWeights(Llm(model, tied=True), "the model")
    head = {"lm_head.weight": tensors()[EMBEDDING]}
    assert same(await load(weights, tensors()), tensors())
    assert same(await load(weights, {**tensors(), **head}), tensors())
    assert same(await load(weights, saved(tmp_path / "new", {**tensors(), **head})), tensors())
    with pytest.raises(BadWeights, match=r"'lm_head.weight' differs from 'model.embed_tokens.weight'"):
        await weights.check({**tensors(), "lm_head.weight": tensors()[EMBEDDING] + 1})

    weights = VllmWeights(Llm(saved(tmp_path / "with", {**tensors(), **head}), tied=True), "the model")
    assert same(await load(weights, tensors()), tensors())
    with pytest.raises(BadWeights, match=r"'lm_head.weight' differs"):
        await weights.check({**tensors(), "lm_head.weight": np.ones((6, 4))})


async def test_checkpoint_is_read_once_before_it_is_overwritten(model: Path) -> None:
    weights = VllmWeights(Llm(model), "the model")
    await weights.prepare()
    saved(model, {**tensors(), UP: torch.ones(3, 4)})
    with pytest.raises(BadWeights, match=r"\(3, 4\), the model's has \(2, 4\)"):
        await weights.check(model)


async def test_a_model_without_safetensors_starts_and_refuses_new_weights(tmp_path: Path) -> None:
    weights = VllmWeights(Llm(beside(tmp_path / "the model")), "the model")
    await weights.prepare()
    with pytest.raises(BadWeights, match=r"'the model' cannot be exchanged: .*no \*.safetensors, only pytorch_model"):
        await weights.check(tensors())


def named(name: str) -> Llm:
    llm = Llm(Path(name))
    llm.vllm_config.model_config.revision = "main"
    llm.vllm_config.load_config = SimpleNamespace(download_dir="/a/cache")
    return llm


async def test_a_model_by_its_name_is_compared_with_what_vllm_downloaded(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def snapshot(name: str, **named: Any) -> str:
        asked.append((name, named["revision"], named["cache_dir"], named["local_files_only"]))
        return str(model)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    weights = VllmWeights(named("someone/model"), "someone/model")
    assert same(await load(weights, tensors()), tensors())
    assert asked == [("someone/model", "main", "/a/cache", True)]


@pytest.mark.parametrize("name", ["someone/nowhere", "s3://bucket/model:with/more", "model.gguf"])
async def test_a_model_that_is_nowhere_here_starts_and_refuses_new_weights(name: str) -> None:
    weights = VllmWeights(named(name), name)
    await weights.prepare()
    with pytest.raises(BadWeights, match=r"cannot be exchanged: the checkpoint to compare with is missing"):
        await weights.check(tensors())


# --- remains after an error


@pytest.mark.parametrize("source", ["state dict", "folder"])
async def test_worker_failure_is_one_line_and_frees_the_memory(
    weights: VllmWeights, tmp_path: Path, source: str
) -> None:
    llm_of(weights).fails = "load_weight_files"
    checked = await weights.check(tensors() if source == "state dict" else saved(tmp_path / "new", tensors()))
    assert len(list(open_memories())) == (source == "state dict")
    with pytest.raises(EngineError) as failure:
        await weights.load(checked)
    assert str(failure.value) == "RuntimeError: the worker failed in load_weight_files"
    assert list(open_memories()) == []


async def test_memory_of_checked_weights_is_freed_if_never_loaded(weights: VllmWeights) -> None:
    checked = await weights.check(tensors())
    assert len(list(open_memories())) == 1
    del checked
    assert list(open_memories()) == []


async def test_cancelled_check_stops_and_frees_its_memory(
    weights: VllmWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tensor(torch.Tensor):  # type: ignore[misc]  # torch is not typed here
        """Tensor that cancels the task that copies it."""

        def detach(self) -> torch.Tensor:
            anyio.from_thread.run_sync(scope.cancel)
            return super().detach().as_subclass(torch.Tensor)

    given = {**tensors(), EMBEDDING: tensors()[EMBEDDING].as_subclass(Tensor)}
    await weights.prepare()
    with anyio.CancelScope() as scope:
        await weights.check(given)
        pytest.fail("the check was not cancelled")
    assert scope.cancelled_caught
    gc.collect()
    assert list(open_memories()) == []


async def test_no_memory_is_one_clear_refusal(weights: VllmWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: Any, **named: Any) -> Any:
        raise OSError(28, "No space left on device")

    await weights.prepare()
    monkeypatch.setattr("os.writev", full)
    with pytest.raises(BadWeights, match=r"copied to shared memory \(.*No space left"):
        await weights.check(tensors())


# --- worker extensions


def test_every_engine_has_the_extension_unless_it_was_given_one() -> None:
    known = frozenset({"worker_extension_cls"})
    assert choose_settings({}, cpu=True, known=known).arguments["worker_extension_cls"] == OURS
    given = {"worker_extension_cls": "mine.Mine"}
    assert choose_settings(given, cpu=True, known=known).arguments == given


async def test_other_extension_reloads_folders_only(model: Path, tmp_path: Path) -> None:
    weights = VllmWeights(Llm(model, extension="collections.OrderedDict"), "the model")
    folder = saved(tmp_path / "new", tensors())
    await weights.load(await weights.check(folder))
    assert llm_of(weights).asked == [("reload_weights", {"weights_path": str(folder)})]
    with pytest.raises(BadWeights, match=rf"worker_extension_cls='collections.OrderedDict'.* inherit from {OURS}"):
        await weights.check(tensors())


class Mine(WeightWorker):
    """A user's extension that has the method for state dicts."""


async def test_an_extension_that_inherits_from_ours_takes_state_dicts(model: Path) -> None:
    weights = VllmWeights(Llm(model, extension=f"{__name__}.Mine"), "the model")
    assert same(await load(weights, tensors()), tensors())


def test_worker_skips_weights_that_the_model_ignores(model: Path) -> None:
    loaded: Tensors = {}
    worker = WeightWorker()
    worker.reload_weights = lambda weights_iterator: loaded.update(weights_iterator)
    worker.load_weight_files([str(model / "model.safetensors")], [UP])
    assert same(loaded, {name: tensor for name, tensor in load_file(model / "model.safetensors").items() if name != UP})


# --- keys and values outside of vLLM's cache


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # raised by torch during the import of vLLM
@pytest.mark.parametrize(
    ("connectors", "keeping"),
    [
        (["ExampleConnector"], "ExampleConnector"),
        (["OffloadingConnector", "ExampleConnector"], "ExampleConnector"),
        (["OffloadingConnector"], None),
        (["OffloadingConnector", "SimpleCPUOffloadConnector"], None),
    ],
)
async def test_connector_that_keeps_old_keys_is_refused_by_name(
    connectors: list[str], keeping: str | None, model: Path
) -> None:
    from vllm.config import KVTransferConfig

    parts = [{"kv_connector": name, "kv_role": "kv_both"} for name in connectors]
    several: Any = {"kv_connector_extra_config": {"connectors": parts}}
    given: Any = parts[0] if len(parts) == 1 else {**parts[0], "kv_connector": "MultiConnector", **several}
    llm = Llm(model)
    llm.vllm_config.kv_transfer_config = KVTransferConfig(**given)
    weights = VllmWeights(llm, "the model")
    if keeping is None:
        (await weights.check(tensors())).close()
        return
    with pytest.raises(BadWeights, match=f"the connector {keeping} .*kv_offloading_size"):
        await weights.check(tensors())
