"""Replacement of `typing.TypedDict` in type hints by `typing_extensions.TypedDict`, for pydantic below Python 3.12."""

from __future__ import annotations

import sys
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, Union, get_args, get_origin

import typing_extensions

__all__ = ["IS_NEEDED", "with_readable_typed_dicts"]

IS_NEEDED = sys.version_info < (3, 12)
"""True if pydantic refuses `typing.TypedDict` in this Python version."""


def with_readable_typed_dicts(hint: Any) -> Any:
    """Return the hint with each `typing.TypedDict` replaced by a typed dict of typing_extensions.

    References of a typed dict to itself, and typed dicts inside the author's dataclasses and models, are kept.
    """
    return _HintReader().read(hint) if IS_NEEDED else hint


class _HintReader:
    def __init__(self) -> None:
        self._made: dict[Any, Any] = {}

    def read(self, hint: Any) -> Any:
        if typing.is_typeddict(hint):
            if hint not in self._made:
                self._made[hint] = hint  # while the fields are read, the type stands for itself, so recursion ends
                self._made[hint] = self._remade(hint)
            return self._made[hint]
        arguments = get_args(hint)
        origin: Any = get_origin(hint)
        if not arguments or origin in (typing.Literal, typing_extensions.Literal) or Ellipsis in arguments[:1]:
            return hint
        if origin is Annotated:
            arguments = arguments[:1]
        read = tuple(arg if isinstance(arg, list) else self.read(arg) for arg in arguments)
        if all(new is old for new, old in zip(read, arguments, strict=True)):
            return hint
        if origin is Annotated:
            return Annotated[(*read, *hint.__metadata__)]
        if origin in (Union, types.UnionType):
            return Union[read]  # noqa: UP007  # the members are in a tuple
        copied: Callable[[Any], Any] | None = getattr(hint, "copy_with", None)
        return copied(read) if copied is not None else origin[read]

    def _remade(self, typed_dict: Any) -> Any:
        fields: dict[str, Any] = {}
        for name, hint in typing.get_type_hints(typed_dict, include_extras=True).items():
            origin = get_origin(hint)
            # `__required_keys__` ignores the marker of a field if annotations are strings.
            is_marked = origin in (typing_extensions.Required, typing_extensions.NotRequired)
            read = self.read(get_args(hint)[0] if is_marked else hint)
            required = origin is typing_extensions.Required or (not is_marked and name in typed_dict.__required_keys__)
            fields[name] = typing_extensions.Required[read] if required else typing_extensions.NotRequired[read]
        functional: Any = typing_extensions.TypedDict  # created at run time, so type checkers cannot follow it
        made = functional(typed_dict.__name__, fields)
        for name in ("__doc__", "__module__", "__qualname__", "__pydantic_config__"):
            if hasattr(typed_dict, name):
                setattr(made, name, getattr(typed_dict, name))
        return made
