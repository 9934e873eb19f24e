"""Comparison of the output layer and the embedding in new weights, for a model in which both are one tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack
from itertools import takewhile
from typing import Any, Final

from runner.engines.vllm.transformers_names import tied_names
from runner.engines.weights import Checkpoint, TensorForm, WeightFolder
from runner.errors import BadWeights

__all__ = ["compare_tied", "equal_in_folder", "equal_in_memory", "equal_in_source"]

_PART_BYTES: Final = 64 << 20  # part of a folder's tensor that is in memory at a time


def compare_tied(
    forms: Mapping[str, TensorForm],
    model: Checkpoint,
    config: Any,
    equal: Callable[[str, str], bool],
    *,
    given_as: str,
) -> None:
    """Check that an output layer equals the embedding, if both are given and the model ties them.

    vLLM ignores one of them, so a difference would be lost.

    Args:
        forms: forms of the given tensors.
        model: the checkpoint with which the engine started.
        config: transformers' configuration of the model.
        equal: function that takes the names of two given tensors of one shape, and returns whether they are equal.
        given_as: description of the given weights, for the error.

    Raises:
        BadWeights: output layer and embedding differ.
    """
    for head, embedding in _pairs(forms, model, config):
        if forms[head].shape != forms[embedding].shape or not equal(head, embedding):
            raise BadWeights(
                f"{given_as}: {head!r} differs from {embedding!r}, and in {model.name} both are one tensor: leave "
                f"out {head!r}, or tie both in the trainer too."
            )


def _pairs(forms: Collection[str], model: Checkpoint, config: Any) -> Iterator[tuple[str, str]]:
    if not model.tied:
        return
    for pair in tied_names(config):
        head, embedding = (_given(name, forms) for name in pair)
        if head and embedding and head != embedding:
            yield head, embedding


def _given(name: str, forms: Collection[str]) -> str:
    """Return the given name of a tensor, which may have another prefix than `name`; "" if the tensor is not given.

    For example, the result for "transformer.wte.weight" may be "wte.weight".
    """

    def common(other: str) -> int:
        parts = zip(reversed(name.split(".")), reversed(other.split(".")), strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], parts))

    best = max(forms, key=common, default="")
    return best if common(best) >= min(2, len(name.split("."))) else ""


def equal_in_memory(one: Any, other: Any) -> bool:
    """Return whether two tensors or arrays have equal values, in the dtype of the second one."""
    import torch

    first, second = torch.as_tensor(one), torch.as_tensor(other)
    same = first.data_ptr() == second.data_ptr() and first.stride() == second.stride()
    return same or bool(torch.equal(first.to(second), second))


def equal_in_folder(folder: WeightFolder, one: str, other: str) -> bool:
    """Return True if two tensors of one shape have equal values. Blocks the thread.

    Only a part of each tensor is in memory at a time.
    """
    from safetensors import safe_open

    shape = folder.forms[one].shape
    if not shape:
        return True
    row_bytes = 8 * max(1, math.prod(shape[1:]))
    rows = max(1, _PART_BYTES // row_bytes)
    with ExitStack() as opened:
        first, second = (
            opened.enter_context(safe_open(folder.folder / folder.forms[name].file, framework="pt")).get_slice(name)
            for name in (one, other)
        )
        parts = (slice(start, start + rows) for start in range(0, shape[0], rows))
        return all(equal_in_memory(first[part], second[part]) for part in parts)


def equal_in_source(source: Any, one: str, other: str) -> bool:
    """Return whether two tensors of vLLM's `WeightSource` have equal values. Blocks the thread.

    If the trainer has several processes, a source can be read only in all processes at once. The tensors are then not
    compared, and the result is False.
    """
    import torch.distributed as several

    if several.is_available() and several.is_initialized() and several.get_world_size() > 1:
        return False
    found = {name: tensor for name, tensor in source if name in (one, other)}
    return equal_in_memory(found[one], found[other])
