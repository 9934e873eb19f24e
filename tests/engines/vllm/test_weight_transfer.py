"""Weights through vLLM's transfer engines, without an engine: the calls to each side, and refusals."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runner.engines.vllm import weight_transfer
from runner.engines.vllm.weight_loading import VllmWeights
from runner.engines.weights import LocalTransfer, WeightTransfer
from runner.errors import BadWeights, EngineError
from tests.engines.small_weights import EMBEDDING, NORM, UP, Llm, Source, load, saved, tensors, without

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"  # required by vLLM


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The folder from which an engine was started."""
    return saved(tmp_path / "the model", tensors())


def announced(given: Mapping[str, torch.Tensor], **others: Any) -> dict[str, Any]:
    """Return update info as vLLM's trainers build it."""
    return {
        "names": list(given),
        "dtype_names": [str(tensor.dtype).removeprefix("torch.") for tensor in given.values()],
        "shapes": [list(tensor.shape) for tensor in given.values()],
        **others,
    }


async def test_transfer_joins_once_and_sends_all_parts(model: Path) -> None:
    llm = Llm(model, transfer=True)
    weights = VllmWeights(llm, "the model")
    first, second = {UP: tensors()[UP]}, without(UP)
    meeting = {"master_address": "127.0.0.1"}
    await load(weights, WeightTransfer(announced(tensors()), init=meeting))
    every = ["start", ("update", list(tensors())), "finish"]
    assert llm.asked == [("init", meeting), *every]
    await load(weights, WeightTransfer(announced(tensors()), init=dict(meeting)))
    await load(weights, WeightTransfer(announced(tensors())))
    assert llm.asked[4:] == [*every, *every]
    llm.asked.clear()
    await load(weights, WeightTransfer([announced(first), announced(second)]))
    assert llm.asked == ["start", ("update", [UP]), ("update", list(second)), "finish"]


def several(*parts: Mapping[str, Any]) -> WeightTransfer:
    return WeightTransfer(parts, init={})


BAD_TRANSFERS: dict[str, tuple[WeightTransfer, str]] = {
    "a tensor is missing": (several(announced(without(UP))), rf"WeightTransfer.*missing '{UP}'"),
    "another shape": (several(announced({**tensors(), NORM: torch.ones(5)})), rf"'{NORM}' has shape \(5,\)"),
    "another dtype": (several(announced({**tensors(), NORM: torch.ones(4).to(torch.int8)})), rf"'{NORM}' is int8"),
    "a tensor twice": (several(announced(tensors()), announced(tensors())), rf"'{EMBEDDING}' twice"),
    "nothing announced": (several({"names": [UP]}), "has no 'dtype_names'"),
    "lists of different lengths": (several({**announced(tensors()), "names": [UP]}), "1 names, 4 dtype_names"),
    "a part that is not a mapping": (several([1]), "part 1 is list"),  # type: ignore[arg-type]  # on purpose
    "never met": (WeightTransfer(announced(tensors())), "are not connected yet"),
}


@pytest.mark.parametrize(("transfer", "message"), BAD_TRANSFERS.values(), ids=BAD_TRANSFERS.keys())
async def test_misfit_transfer_is_refused_before_any_call(model: Path, transfer: WeightTransfer, message: str) -> None:
    llm = Llm(model, transfer=True)
    with pytest.raises(BadWeights, match=message):
        await VllmWeights(llm, "the model").check(transfer)
    assert llm.asked == []


async def test_transfer_without_a_backend_names_the_argument(model: Path) -> None:
    with pytest.raises(BadWeights, match=r'VllmEngine\(weight_transfer_config=\{"backend": "nccl"\}\)'):
        await VllmWeights(Llm(model), "the model").check(WeightTransfer(announced(tensors()), init={}))


async def test_failed_connection_leaves_the_weights_unchanged(model: Path) -> None:
    llm = Llm(model, transfer=True)
    weights = VllmWeights(llm, "the model")
    llm.fails = "init"
    for _ in range(2):
        with pytest.raises(BadWeights, match="did not connect: RuntimeError: the worker failed in init"):
            await weights.check(WeightTransfer(announced(tensors()), init={"a": 1}))
    assert llm.asked == [("init", {"a": 1})] * 2, "tried again, since they have not connected"


@pytest.mark.parametrize("at", ["start", "update", "finish"])
async def test_a_trainer_that_goes_away_is_a_failure_and_no_wait_for_ever(model: Path, at: str) -> None:
    llm = Llm(model, transfer=True)
    weights = VllmWeights(llm, "the model")
    checked = await weights.check(WeightTransfer(announced(tensors()), init={}, seconds=0.01))
    llm.hangs = at
    with pytest.raises(EngineError, match=r"trainer did not send all weights within 0.01 s"):
        await weights.load(checked)


async def test_both_ends_in_one_process_meet_once_and_send_in_one_call(model: Path, tmp_path: Path) -> None:
    from runner.engines.vllm.worker.file_transfer import FileTransferInfo

    llm = Llm(model, transfer=True)
    weights = VllmWeights(llm, "the model")
    here, source = FileTransferInfo(str(tmp_path), rank=0), Source(tensors())
    met, sent = ("init", {"folder": str(tmp_path)}), ["start", ("update", list(tensors())), "finish"]
    await load(weights, LocalTransfer(here, source))
    await load(weights, LocalTransfer(here, source))
    assert llm.asked == [met, *sent, *sent]
    await load(weights, LocalTransfer(here, Source(tensors())))
    assert llm.asked[7:] == [met, *sent], "another trainer's model connects again"
    with pytest.raises(BadWeights, match="are not connected yet"):
        await weights.check(WeightTransfer(announced(tensors())))

    llm.asked.clear()
    llm.fails = "init"
    for _ in range(2):
        with pytest.raises(BadWeights, match=r"LocalTransfer: engine and trainer did not connect: .*failed in init"):
            await weights.check(LocalTransfer(here, Source(tensors())))
    assert llm.asked == [met, met]
    llm.fails = ""
    checked = await weights.check(LocalTransfer(here, source, seconds=0.2))
    llm.hangs = "update"
    with pytest.raises(EngineError, match=r"trainer did not send all weights within 0.2 s"):
        await weights.load(checked)


class OnGpu(Llm):
    """A vLLM whose only worker has a GPU."""

    async def collective_rpc(self, method: str, *, kwargs: dict[str, Any]) -> Any:
        await super().collective_rpc(method, kwargs=kwargs)
        return ["GPU-7"]


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        ("7", r"LocalTransfer: trainer and engine are both on GPU-7, .*\"ipc\".*another GPU"),
        ("8", "LocalTransfer: engine and trainer did not connect"),
        (None, "LocalTransfer: engine and trainer did not connect"),
    ],
)
async def test_nccl_on_a_shared_gpu_is_refused_before_it_connects(
    model: Path, monkeypatch: pytest.MonkeyPatch, trainer: str | None, message: str
) -> None:
    monkeypatch.setattr(weight_transfer, "trainer_gpu", lambda: trainer)
    llm = OnGpu(model, transfer=True)
    with pytest.raises(BadWeights, match=message):
        await VllmWeights(llm, "the model").check(LocalTransfer(SimpleNamespace(backend="nccl"), Source(tensors())))
    assert "start" not in llm.asked


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Source(without(UP)), rf"LocalTransfer: missing '{UP}'"),
        (Source({**tensors(), UP: torch.ones(3, 4)}), rf"LocalTransfer: the tensor '{UP}' has shape"),
        (tensors(), r"LocalTransfer\(source=...\) is dict, which does not list .*ModuleSource"),
    ],
    ids=["a tensor is missing", "another shape", "no source"],
)
async def test_a_source_that_does_not_fit_is_refused_before_both_ends_meet(
    model: Path, source: Any, message: str
) -> None:
    llm = Llm(model, transfer=True)
    with pytest.raises(BadWeights, match=message):
        await VllmWeights(llm, "the model").check(LocalTransfer(None, source))
    assert llm.asked == []
