"""Tensors for workers: they arrive unchanged, as views, and are stored once."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.cluster.ray import launcher as ray_launcher
from runner.cluster.ray.launcher import as_arrays, as_tensors

torch: Any = pytest.importorskip("torch")

DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "uint8", "bool")


@st.composite
def tensors(draw: st.DrawFn) -> Any:
    """Tensors of every type that weights have: also empty ones, single numbers, and parts that are not contiguous."""
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    kind = getattr(torch, draw(st.sampled_from(DTYPES)))
    tensor = torch.randint(0, 2, [2 * size for size in shape]).to(kind)
    tensor = tensor[tuple(slice(draw(st.integers(0, 1)), None, 2) for _ in shape)]
    turned: bool = draw(st.booleans())
    return tensor.transpose(0, -1) if shape and turned else tensor


def bytes_of(tensor: Any) -> Any:
    return bytes(torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).reshape(-1).view(torch.uint8).numpy())


@given(given=st.dictionaries(st.text(max_size=3), tensors(), max_size=3))
def test_every_tensor_comes_back_as_it_was(given: dict[str, Any]) -> None:
    back = as_tensors(pickle.loads(pickle.dumps(as_arrays(given))))
    assert back.keys() == given.keys()
    for name, tensor in given.items():
        assert (back[name].dtype, back[name].shape) == (tensor.dtype, tensor.shape)
        assert bytes_of(back[name]) == bytes_of(tensor)


@pytest.mark.parametrize("dtype", DTYPES)
def test_contiguous_tensor_is_copied_neither_there_nor_back(dtype: str) -> None:
    given = torch.ones(3, 4).to(getattr(torch, dtype))
    sent = as_arrays({"w": given})
    buffers: list[pickle.PickleBuffer] = []
    packed = pickle.dumps(sent, protocol=5, buffer_callback=buffers.append)
    back = as_tensors(pickle.loads(packed, buffers=buffers))["w"]
    assert back.data_ptr() == given.data_ptr()


@pytest.mark.parametrize("value", ["a folder", None, {"rank": 8}])
def test_value_without_tensors_is_unchanged(value: Any) -> None:
    assert as_tensors(as_arrays(value)) == value


@pytest.mark.anyio
async def test_a_state_dict_is_stored_once_however_many_workers_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    stored: list[Any] = []

    def put(value: Any) -> int:
        stored.append(value)
        return len(stored) - 1

    ray = SimpleNamespace(put=put, get=stored.__getitem__)
    monkeypatch.setattr(ray_launcher, "ray_module", lambda: ray)
    monkeypatch.setattr(ray_launcher.RayLauncher, "_require_session", lambda launcher: None)  # as if connected
    launcher = ray_launcher.RayLauncher("RayEngines", address=None, cpus=1, gpus=0, runtime_env=None)
    weights = {"w": torch.ones(3, 4)}
    given = await launcher.put(weights)
    read = [pickle.loads(pickle.dumps(given)).read()["w"] for _ in range(4)]
    assert len(stored) == 1
    assert {tensor.data_ptr() for tensor in read} == {weights["w"].data_ptr()}
