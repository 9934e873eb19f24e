"""The sizes of an engine: impossible sizes are refused by name before anything starts, and every worker is called."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from runner.engines.vllm import parallel
from runner.engines.vllm.engine import VllmEngine
from runner.engines.vllm.parallel import (
    BINDING,
    ParallelSizes,
    call_all_workers,
    check_machine,
    cores_by_worker,
    ranks_of,
    stale_tensors,
)
from runner.engines.vllm.worker.extension import WeightWorker
from runner.errors import BadOption

NAMES = ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size")


@pytest.fixture(autouse=True)
def unbound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(BINDING, raising=False)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [0, -1, True, 1.5, "2", None])
def test_invalid_size_is_refused_where_it_is_given(name: str, size: object) -> None:
    with pytest.raises(BadOption, match=rf"VllmEngine\({name}=.*\): give a whole number of at least 1"):
        VllmEngine(**{name: size})  # type: ignore[arg-type]


@pytest.mark.parametrize(("cpu", "device"), [(True, "CPU core"), (False, "GPU")], ids=["cpu", "gpu"])
def test_more_workers_than_devices_are_refused(cpu: bool, device: str) -> None:
    given = {"data_parallel_size": 2, "tensor_parallel_size": 3}
    check_machine(given, cpu=cpu, devices=6)
    with pytest.raises(BadOption) as refusal:
        check_machine(given, cpu=cpu, devices=5)
    assert str(refusal.value) == (
        f"VllmEngine(data_parallel_size=2, tensor_parallel_size=3): these sizes need 6 workers, each with its own "
        f"{device}, but this process may use only 5. Give smaller sizes."
    )


@pytest.mark.parametrize(
    "elsewhere",
    [{"nnodes": 2}, {"data_parallel_size_local": 1}, {"data_parallel_backend": "ray"}],
    ids=["nodes", "local", "ray"],
)
def test_devices_of_other_machines_are_not_counted(elsewhere: dict[str, Any]) -> None:
    check_machine({"data_parallel_size": 16, **elsewhere}, cpu=False, devices=8)


def test_pipeline_parallelism_on_cpu_is_refused_with_the_fix() -> None:
    given = {"pipeline_parallel_size": 2}
    with pytest.raises(BadOption, match=r"pipeline_parallel_size=2\).*tensor_parallel_size=2.*data_parallel_size=2"):
        check_machine(given, cpu=True, devices=8)
    check_machine(given, cpu=False, devices=8)


@pytest.mark.parametrize("bound", ["0", "0-3|4-7|8"])
def test_cores_for_another_number_of_workers_are_refused(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BINDING, bound)
    with pytest.raises(BadOption, match=rf"{BINDING}=.*, and the engine has 2: separate the cores of workers by bars"):
        check_machine({"data_parallel_size": 2}, cpu=True, devices=16)
    check_machine({"data_parallel_size": 2}, cpu=False, devices=16)


@pytest.mark.parametrize("bound", ["auto", "nobind", "0-3|4-7", ""])
def test_cores_that_are_given_for_each_worker_are_left_alone(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(BINDING, bound)
    check_machine({"data_parallel_size": 2}, cpu=True, devices=16)


@pytest.mark.parametrize(("workers", "cores"), [(1, 5), (2, 5), (3, 3), (4, 64), (5, 8)])
def test_cores_are_split_evenly_among_workers(workers: int, cores: int) -> None:
    shares = [[int(core) for core in share.split(",")] for share in cores_by_worker(workers, range(cores)).split("|")]
    assert len(shares) == workers
    assert sorted(core for share in shares for core in share) == list(range(cores))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_threads_of_one_core_are_one_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    # threads 0 and 4 belong to one core
    monkeypatch.setattr(parallel, "_on_chip", lambda thread: (0, thread % 4, thread))
    assert cores_by_worker(2, range(8)) == "0,1,4,5|2,3,6,7"


def test_the_header_names_the_sizes() -> None:
    sizes = ParallelSizes.of({"data_parallel_size": 4, "tensor_parallel_size": 2, "max_num_seqs": 8})
    assert (sizes.described(), sizes.workers) == ({"data": 4, "tensor": 2, "pipeline": 1}, 8)


class Client:
    """A client of two ranks with two workers each."""

    engine_ranks_managed = (0, 1)

    async def call_utility_all_async(self, method: str, *given: Any) -> list[list[str]]:
        assert (method, *given) == ("collective_rpc", "name", None, (), {"of": "device"})
        return [["a", "b"], ["c", "d"]]


class Llm:
    def __init__(self, client: object) -> None:
        self.engine_core = client

    async def collective_rpc(self, method: str, *, kwargs: dict[str, Any]) -> list[str]:
        return ["a", "b"]


@pytest.mark.anyio
async def test_the_workers_of_every_rank_answer() -> None:
    assert await call_all_workers(Llm(Client()), "name", of="device") == ["a", "b", "c", "d"]
    assert await call_all_workers(Llm(SimpleNamespace()), "name", of="device") == ["a", "b"], "an older vLLM"


def test_an_engine_has_the_ranks_that_vllm_sends_requests_to() -> None:
    assert (ranks_of(Llm(Client())), ranks_of(Llm(SimpleNamespace())), ranks_of(SimpleNamespace())) == (2, 1, 1)


@pytest.mark.parametrize(
    ("changed", "kept"),
    [
        ([{"a": True, "b": True}, {"a": True, "b": True}], {}),
        ([{"a": False}, {"a": False}], {}),  # the same weights again
        ([{"a": True, "b": False}, {"a": True, "b": False}], {}),  # frozen by the trainer
        ([{"a": True, "b": True}, {"a": False, "b": False}], {1: ["a", "b"]}),
        ([{"a": True, "b": True}, {"a": True, "b": False}, {"a": False, "b": True}], {1: ["b"], 2: ["a"]}),
        ([{"first": True}, {"last": False}], {1: ["last"]}),  # stages of pipeline parallelism
    ],
)
def test_stale_tensors_of_a_worker_are_found_among_frozen_ones(
    changed: list[dict[str, bool]], kept: dict[int, list[str]]
) -> None:
    assert stale_tensors(changed) == kept


def test_worker_reports_which_of_its_tensors_changed() -> None:
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Linear(6, 4)).to(torch.bfloat16)
    model.register_buffer("scale", torch.tensor(2.0))
    worker = WeightWorker.__new__(WeightWorker)
    worker.model_runner = SimpleNamespace(model=model)
    assert worker.changed_tensors() is None
    same = worker.changed_tensors()
    assert same is not None
    assert not any(same.values())
    with torch.no_grad():
        model[0].weight.copy_(model[0].weight.roll(3, 0))  # two halves swapped
        model[1].weight.copy_(model[1].weight.flip(1))
        model[1].bias[2] *= 1.01
        model.scale.mul_(0.5)
    changed = worker.changed_tensors()
    assert changed is not None
    assert {name for name, differs in changed.items() if differs} == {"0.weight", "1.weight", "1.bias", "scale"}
