"""The bytes of tensors: exact, copied only if necessary, and read without a call that releases the GIL."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

from runner.engines.tensor_bytes import bytes_of, tensor_of

torch: Any = pytest.importorskip("torch")

DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "int64", "uint8", "bool", "complex128")


def expected(tensor: Any) -> bytes:
    plain = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).reshape(-1)
    return bytes(plain.view(torch.uint8).numpy()) if plain.numel() else b""


class Operations(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[misc]  # torch may be missing, and is Any here
    """Recorder of every operation of torch, since each of them releases the GIL."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(function))
        return function(*args, **(kwargs or {}))


class Own(torch.Tensor):  # type: ignore[misc]  # as above
    """A tensor subclass, as in libraries of quantized tensors."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (3, 5), (2, 0, 3)])
def test_bytes_are_those_of_the_tensor_and_it_comes_back(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape).to(getattr(torch, dtype))
    found = bytes_of(tensor)
    assert bytes(found) == expected(tensor)
    back = tensor_of(found, dtype, shape)
    assert (back.dtype, tuple(back.shape)) == (tensor.dtype, shape)
    assert torch.equal(back, tensor)


ODD = {
    "transposed": lambda: torch.arange(12.0).reshape(3, 4).T,
    "a part": lambda: torch.arange(12.0)[1::2],
    "one of many": lambda: torch.arange(12.0)[5:6:2],
    "expanded": lambda: torch.ones(1).expand(4),
    "negated lazily": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj().imag,
    "conjugated lazily": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "of a class of its own": lambda: torch.arange(4.0).as_subclass(Own),
    "with a gradient": lambda: torch.arange(4.0, requires_grad=True) * 2,
    "a parameter": lambda: torch.nn.Parameter(torch.arange(4.0)),
}


@pytest.mark.parametrize("kind", ODD)
def test_a_tensor_of_any_layout_and_class_is_written_as_it_reads(kind: str) -> None:
    tensor = ODD[kind]()
    assert bytes(bytes_of(tensor)) == expected(tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg())


@pytest.mark.parametrize("kind", [lambda values: values, torch.nn.Parameter], ids=["tensor", "parameter"])
def test_matching_layout_is_a_view_that_outlives_the_tensor(kind: Any) -> None:
    tensor = kind(torch.arange(64.0))
    at, wanted = tensor.data_ptr(), expected(tensor)
    with Operations() as operations:
        found = bytes_of(tensor, "float32")
    assert operations.seen == []
    assert found.ctypes.data == at
    del tensor
    gc.collect()
    others = [torch.zeros(64) for _ in range(100)]
    assert bytes(found) == wanted, f"{len(others)} other tensors took its memory"


def test_view_keeps_the_memory_when_the_tensor_gets_another() -> None:
    parameter = torch.nn.Parameter(torch.arange(1000.0))
    found, wanted = bytes_of(parameter), expected(parameter.detach())
    parameter.data = torch.empty(0)  # as trainers do to free a device's memory
    gc.collect()
    others = [torch.zeros(1000) for _ in range(100)]
    assert bytes(found) == wanted, f"{len(others)} other tensors took its memory"


@pytest.mark.parametrize("order", ["<", ">"])
def test_an_array_of_another_order_of_bytes_is_read_by_its_numbers(order: str) -> None:
    array = np.arange(6, dtype=f"{order}f4").reshape(2, 3)
    assert bytes(bytes_of(array)) == expected(torch.arange(6.0).reshape(2, 3))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rounding_equals_torch_with_few_operations(dtype: str) -> None:
    tensor = torch.randn(7, 9, dtype=torch.float64)
    with Operations() as operations:
        found = bytes_of(tensor, dtype)
    assert len(operations.seen) <= 3, operations.seen
    assert bytes(found) == expected(tensor.to(getattr(torch, dtype)))


@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
def test_an_array_is_taken_as_a_tensor_is(dtype: str | None) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    array.setflags(write=False)
    for given in (array, array.T, array[1:, ::2], np.array(1.5, np.float32)):
        tensor = torch.from_numpy(given.copy())
        assert bytes(bytes_of(given, dtype)) == expected(tensor.to(getattr(torch, dtype or "float32")))


def test_bytes_are_a_tensor_again_by_no_operation_for_its_shape() -> None:
    array = np.zeros(64, np.uint8)
    for dtype in ("bfloat16", "float32", "int32"):
        with Operations() as operations:
            tensor = tensor_of(array, dtype, (2, 32 // getattr(torch, dtype).itemsize))
        assert {*operations.seen} <= {"aten.lift_fresh.default", "aten.view.dtype", "aten.detach.default"}
        assert tensor.data_ptr() == array.ctypes.data
