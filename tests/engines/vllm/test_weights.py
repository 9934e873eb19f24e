"""New weights in the real engine: every way to load them has the same result, misfits change nothing."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import anyio
import psutil
import pytest

from runner.engines.base import GenerationRequest
from runner.engines.vllm.engine import VllmEngine
from runner.engines.vllm.weight_loading import VllmWeights
from runner.engines.weights import LocalTransfer, WeightTransfer
from runner.errors import BadWeights
from runner.models import demo_model
from runner.options import Sampling
from runner.testing.engine_pool import PooledEngine
from runner.tokens.log import VersionSpan
from tests.engines.vllm.memories import open_memories

pytestmark = [pytest.mark.anyio, pytest.mark.engine]

WATCHDOG_SECONDS = 1200.0
EMBEDDING, NORM = "model.embed_tokens.weight", "model.norm.weight"

_names = itertools.count()


@pytest.fixture(scope="module")
def old() -> dict[str, Any]:
    """The demo model's tensors."""
    return tensors_of(demo_model())


@pytest.fixture(scope="module")
def new(old: dict[str, Any]) -> dict[str, Any]:
    return others(old)


@pytest.fixture(scope="module")
def folder(new: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shards(new, tmp_path_factory.mktemp("new-weights"))


def tensors_of(model: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(model / "model.safetensors"))


def others(old: Mapping[str, Any]) -> dict[str, Any]:
    """Other tensors with the same names and shapes."""
    return {
        name: tensor * 3 if name.endswith("layers.5.mlp.down_proj.weight") else tensor for name, tensor in old.items()
    }


def shards(new: Mapping[str, Any], folder: Path) -> Path:
    """The tensors in two shards, with an index."""
    from safetensors.torch import save_file

    where = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(new)}
    for file in sorted(set(where.values())):
        save_file({name: tensor for name, tensor in new.items() if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    return folder


Said = tuple[list[int], list[float]]


async def say(engine: VllmEngine, max_tokens: int = 8) -> Said:
    """Return greedy ids and their log-probabilities. Nothing is cached, so that they are the same bit for bit."""
    await engine.reset_prefix_cache()
    sampling = dataclasses.replace(Sampling.defaults(), max_tokens=max_tokens, temperature=0.0)
    request = GenerationRequest(name=f"weights {next(_names)}", prompt=list(range(1000, 1040)), sampling=sampling)
    async with engine.stream(request) as stream:
        deltas = [delta async for delta in stream]
    assert stream.finish is not None
    assert stream.finish.versions == (VersionSpan(engine.weight_version, 0, max_tokens),)
    return [one for delta in deltas for one in delta.token_ids], [
        one for delta in deltas for one in delta.logprobs or ()
    ]


def assert_nothing_is_left(engine: VllmEngine) -> None:
    gc.collect()
    assert list(open_memories()) == []
    processes = [
        process for pid in engine.processes() for process in (psutil.Process(pid), *psutil.Process(pid).children(True))
    ]
    assert processes, "the core, which may contain its worker"
    for process in processes:
        maps = Path(f"/proc/{process.pid}/maps").read_text()
        assert "deltarunner-weights" not in maps


def wide(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors of a trainer that uses float32 and names the output layer."""
    return {**{name: tensor.float() for name, tensor in tensors.items()}, "lm_head.weight": tensors[EMBEDDING].float()}


async def test_equal_weights_from_every_source_have_equal_output(
    engine: VllmEngine, old: dict[str, Any], new: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await say(engine)
    update = await engine.update_weights(folder)
    assert update.version == engine.weight_version
    other = await say(engine)
    assert other[0] != first[0]
    for back, forth in (
        (demo_model(), new),
        (old, wide(new)),
        (str(demo_model()), {name: tensor.float().numpy() for name, tensor in new.items()}),
    ):
        await engine.update_weights(back)
        assert await say(engine) == first
        await engine.update_weights(forth)
        assert await say(engine) == other
        assert_nothing_is_left(engine)

    # With another worker extension, vLLM reads a folder itself, which leaves old copies on a CPU.
    with monkeypatch.context() as patch:
        patch.setattr(VllmWeights, "extended", False)
        with pytest.raises(BadWeights, match="packed copies of the old weights"):
            await engine.update_weights(demo_model())
    assert await say(engine) == other
    await engine.update_weights(demo_model(), version="the first again")
    assert (engine.weight_version, await say(engine)) == ("the first again", first)


@pytest.mark.whole
async def test_misfit_changes_nothing_even_during_turns(
    engine: VllmEngine, old: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    first, version = await say(engine, 100), engine.weight_version
    truncated = tmp_path / "truncated"
    truncated.mkdir()
    (truncated / "model.safetensors").write_bytes((folder / "model-0.safetensors").read_bytes()[:-7])
    nan = old[NORM].clone()
    nan[3] = float("nan")
    misfits: list[tuple[Any, str]] = [
        ({name: tensor for name, tensor in old.items() if name != NORM}, rf"missing '{NORM}'"),
        ({**old, "extra": old[NORM]}, r"called 'extra'"),
        ({**old, NORM: old[NORM][:-1]}, rf"'{NORM}' has shape \(575,\), the model's has \(576,\)"),
        ({**old, NORM: old[NORM].int()}, rf"'{NORM}' is int32"),
        ({**old, NORM: nan}, rf"'{NORM}' holds a value that is NaN"),
        ({**wide(old), "lm_head.weight": old[EMBEDDING] + 1}, rf"'lm_head.weight' differs from '{EMBEDDING}'"),
        (truncated, r"model.safetensors is truncated: the tensor '"),
        (tmp_path / "nowhere", r"the folder of weights .* does not exist"),
        (WeightTransfer({"names": [], "dtype_names": [], "shapes": []}), r"weight_transfer_config"),
    ]
    said: list[Said] = []

    async def answer() -> None:
        said.append(await say(engine, 100))

    with anyio.fail_after(WATCHDOG_SECONDS):
        async with anyio.create_task_group() as group:
            group.start_soon(answer)
            for source, message in misfits:
                with pytest.raises(BadWeights, match=message):
                    await engine.update_weights(source, version="never")
    assert (said, engine.weight_version) == ([first], version)
    assert_nothing_is_left(engine)


async def test_update_cancelled_in_its_check_changes_nothing(
    engine: VllmEngine, old: dict[str, Any], new: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    first, version = await say(engine), engine.weight_version

    class Cancelling(torch.Tensor):  # type: ignore[misc]  # torch is not typed here
        """Tensor that cancels the task that copies it."""

        def detach(self) -> Any:
            anyio.from_thread.run_sync(scope.cancel)
            return super().detach().as_subclass(torch.Tensor)

    with anyio.CancelScope() as scope:
        await engine.update_weights({**new, EMBEDDING: new[EMBEDDING].as_subclass(Cancelling)})
        pytest.fail("the update was not cancelled")
    assert scope.cancelled_caught
    assert (await say(engine), engine.weight_version) == (first, version)
    assert_nothing_is_left(engine)


def announced(tensors: Mapping[str, Any], names: list[str], file: str) -> dict[str, Any]:
    return {
        "names": names,
        "dtype_names": [str(tensors[name].dtype).removeprefix("torch.") for name in names],
        "shapes": [list(tensors[name].shape) for name in names],
        "file": file,
    }


def parcels(folder: Path, tensors: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return update infos for the tensors in the files of a folder."""
    where: dict[str, str] = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    files = sorted(set(where.values()))
    return [announced(tensors, [name for name in where if where[name] == file], file) for file in files]


def test_a_transfer_engine_brings_the_same_weights(
    float32_engine: PooledEngine, small_model_folder: Path, tmp_path: Path
) -> None:
    old = tensors_of(small_model_folder)
    new = others(old)

    async def scenario() -> None:
        engine = cast("VllmEngine", float32_engine.inner)
        with anyio.fail_after(WATCHDOG_SECONDS):
            await transfer_scenario(engine, small_model_folder, new, shards(new, tmp_path))
            await local_scenario(engine, old, new, tmp_path)
            await engine.update_weights(small_model_folder)

    float32_engine.home.call(scenario)


def test_an_update_leaves_no_tensor_to_a_later_collection(
    float32_engine: PooledEngine, small_model_folder: Path
) -> None:
    async def scenario() -> None:
        engine = cast("VllmEngine", float32_engine.inner)
        call = engine.vllm.llm.collective_rpc
        await call("switch_collector", args=(False,))  # else a collection may begin right after an update
        try:
            for given in (small_model_folder, tensors_of(small_model_folder)):
                await engine.update_weights(given)
                assert await call("tensors_in_cycles") == [0]
        finally:
            await call("switch_collector", args=(True,))

    float32_engine.home.call(scenario)


async def transfer_scenario(engine: VllmEngine, model: Path, new: dict[str, Any], folder: Path) -> None:
    first, meeting = await say(engine), {"folder": str(folder)}
    await engine.update_weights(new)  # the extension inherits from ours
    other = await say(engine)
    await engine.update_weights(model)
    assert await say(engine) == first != other

    version = engine.weight_version
    for refused, message in (
        (WeightTransfer(parcels(folder, new)), "are not connected yet"),
        (
            WeightTransfer(parcels(folder, new), init={"folder": "/nowhere"}),
            "did not connect: /nowhere is not a folder",
        ),
        (WeightTransfer(parcels(folder, new)[:1], init=meeting), "missing '"),
    ):
        with pytest.raises(BadWeights, match=message):
            await engine.update_weights(refused)
        assert (await say(engine), engine.weight_version) == (first, version)

    await engine.update_weights(WeightTransfer(parcels(folder, new), init=meeting), version="received")
    assert (engine.weight_version, await say(engine)) == ("received", other)
    await engine.update_weights(model)
    await engine.update_weights(WeightTransfer(parcels(folder, new)))  # they are already connected
    assert await say(engine) == other


class Tensors:
    """A trainer's model, as vLLM's `WeightSource`."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        self.tensors = tensors

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer.base import ParamMeta

        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self.tensors.items())


async def local_scenario(engine: VllmEngine, old: dict[str, Any], new: dict[str, Any], place: Path) -> None:
    """Run trainer and engine in one process, in one call."""
    from runner.engines.vllm.worker.file_transfer import FileTransferInfo

    other, version = await say(engine), engine.weight_version
    here = FileTransferInfo(str(place), rank=0)
    for refused, message in (
        (LocalTransfer(here, Tensors({**new, NORM: new[NORM][1:]})), rf"LocalTransfer: the tensor '{NORM}' has shape"),
        (
            LocalTransfer(FileTransferInfo("/nowhere", rank=0), Tensors(new)),
            "did not connect: /nowhere is not a folder",
        ),
    ):
        with pytest.raises(BadWeights, match=message):
            await engine.update_weights(refused)
        assert (await say(engine), engine.weight_version) == (other, version)
    await engine.update_weights(LocalTransfer(here, Tensors(old)), version="sent")
    assert engine.weight_version == "sent"
    assert await say(engine) != other
    source = Tensors(new)
    for version in ("sent again", "and again"):
        await engine.update_weights(LocalTransfer(here, source), version=version)
        assert await say(engine) == other
