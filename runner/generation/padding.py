"""Padded arrays of a trainer, torch or numpy: rows of ids with padding on the right, parsed and checked."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from runner.errors import BadBatch, BadOption

__all__ = ["as_kind_of", "read_padded", "require_mapping", "verify_right_padding"]

_PAIRS = (("input_ids", "input_lengths"), ("output_ids", "unpadded_sequence_lengths"))


def verify_right_padding(
    data: Mapping[str, Any],
    pad_value: int = 0,
    raise_error: bool = True,
) -> tuple[bool, str | None]:
    """Check that every row is right-padded according to its length.

    Args:
        data: prompts (`input_ids` and `input_lengths`), outputs (`output_ids` and `unpadded_sequence_lengths`), or
            both; torch or numpy, shapes [rows, length] and [rows].
        pad_value: the id of the padding.
        raise_error: True to raise the fault, False to return it.

    Returns:
        (True, None) if all rows are right-padded; otherwise False, and the fault with its row.

    Raises:
        BadBatch: the fault, if `raise_error`; it is a ValueError.
        BadOption: `pad_value` is not a whole number.
    """
    if not isinstance(pad_value, int | np.integer) or isinstance(pad_value, bool):
        raise BadOption(f"pad_value={pad_value!r}: give the id that rows are padded with; a tokenizer may have none.")
    try:
        require_mapping(data)
        pairs = [pair for pair in _PAIRS if all(name in data for name in pair)]
        if not pairs:
            wanted = " or ".join(" and ".join(pair) for pair in _PAIRS)
            raise BadBatch(f"the batch has {', '.join(map(str, data)) or 'no keys'}: give {wanted}.")
        for pair in pairs:
            read_padded(data, *pair, pad_value=pad_value)
    except BadBatch as error:
        if raise_error:
            raise
        return False, str(error)
    return True, None


def require_mapping(batch: Any) -> None:
    """Raise BadBatch if a batch is not a mapping."""
    if not isinstance(batch, Mapping):
        raise BadBatch(f"the batch is a {type(batch).__name__}: give a dictionary.")


def read_padded(
    data: Mapping[str, Any], ids_name: str, lengths_name: str, *, pad_value: int
) -> tuple[NDArray[np.integer[Any]], NDArray[np.integer[Any]]]:
    """Check a batch, and return its ids, shape [rows, length], and the lengths of its rows, shape [rows].

    Raises:
        BadBatch: an array is missing or invalid, or a row is not right-padded.
    """
    for name in (ids_name, lengths_name):
        if name not in data:
            raise BadBatch(f"the batch has no {name}, only {', '.join(map(str, data)) or 'no keys'}: add {name}.")
    ids, lengths = _as_integers(data[ids_name], ids_name), _as_integers(data[lengths_name], lengths_name)
    if ids.ndim != 2:
        raise BadBatch(f"{ids_name} has the shape {list(ids.shape)}: give [rows, length], right-padded.")
    if lengths.shape != ids.shape[:1]:
        raise BadBatch(
            f"{ids_name} has {len(ids)} rows and {lengths_name} the shape {list(lengths.shape)}: give one length a row."
        )
    _check_lengths(ids, lengths, lengths_name)
    _check_padding(ids, lengths, ids_name, pad_value)
    return ids, lengths


def _check_lengths(ids: NDArray[Any], lengths: NDArray[Any], name: str) -> None:
    width = ids.shape[1]
    wrong = np.flatnonzero((lengths < 0) | (lengths > width))
    if len(wrong):
        row = wrong[0]
        raise BadBatch(f"row {row}: {name} is {lengths[row]}, but a row has {width} positions.{_others(wrong)}")


def _check_padding(ids: NDArray[Any], lengths: NDArray[Any], name: str, pad_value: int) -> None:
    after = np.arange(ids.shape[1]) >= lengths[:, None]
    strange = after & (ids != pad_value)
    wrong = np.flatnonzero(strange.any(axis=1))
    if not len(wrong):
        return
    row = wrong[0]
    position = np.flatnonzero(strange[row])[0]
    raise BadBatch(
        f"row {row}: {name} holds {ids[row, position]} at position {position}, where the padding {pad_value} should "
        f"be: its length is {lengths[row]}.{_advice(ids[row], int(lengths[row]), pad_value)}{_others(wrong)}"
    )


def _advice(row: NDArray[Any], length: int, pad_value: int) -> str:
    """Return a sentence about the probable cause, or "" if the row does not show the cause."""
    if np.all(row[: len(row) - length] == pad_value):
        return " It seems to be padded on the left: put its ids first."
    if len(set(row[length:].tolist())) == 1:
        return f" If {row[length]} is your padding, set pad_value, or '_pad_token_id' of the configuration."
    return ""


def _others(wrong: NDArray[Any]) -> str:
    more = ", ".join(map(str, wrong[1:11])) + (", ..." if len(wrong) > 11 else "")
    return f" The same fault is in further rows ({len(wrong) - 1}): {more}." if len(wrong) > 1 else ""


# --- torch or numpy


def _as_integers(value: Any, name: str) -> NDArray[np.integer[Any]]:
    """Return a tensor or an array as a numpy array, without a copy if it is on the CPU.

    Raises:
        BadBatch: the value is neither, or its numbers are not integers.
    """
    if not isinstance(value, np.ndarray) and not _is_torch(value):
        raise BadBatch(f"{name} is a {type(value).__name__}: give a torch tensor or a numpy array.")
    kind = str(value.dtype).removeprefix("torch.")
    if not kind.startswith(("int", "uint")):
        raise BadBatch(f"{name} holds {kind}: give integers, such as int64.")
    return value if isinstance(value, np.ndarray) else value.detach().cpu().numpy()


def as_kind_of(like: Any, array: NDArray[Any]) -> Any:
    """Return `array` in the kind of `like`: a torch tensor on the same device, or a numpy array."""
    return sys.modules["torch"].from_numpy(array).to(like.device) if _is_torch(like) else array


def _is_torch(value: Any) -> bool:
    torch = sys.modules.get("torch")  # before torch is imported, no value is a tensor
    return torch is not None and isinstance(value, torch.Tensor)
