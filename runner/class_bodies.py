"""Check of the decorated methods in a class body while Python executes it."""

from __future__ import annotations

import inspect
from typing import Any, Final

from runner.errors import BadEnvironment

__all__ = ["refuse_duplicate"]

_MARKS: Final = ("__deltarunner_scorer__", "__deltarunner_tool__")
"""The attributes that the decorators set on a method."""

_MAX_FRAMES: Final = 5
"""Maximum number of frames between a decorator and the body of the class."""


def refuse_duplicate(method: Any, decorator: str) -> None:
    """Refuse a method whose class body already contains a decorated method of the same name.

    Python would silently keep only the last method. An override in a subclass is in another body and allowed.

    Args:
        method: the method that is being decorated.
        decorator: name of the decorator.

    Raises:
        BadEnvironment: the name occurs twice.
    """
    name, qualified = getattr(method, "__name__", None), getattr(method, "__qualname__", None)
    frame = inspect.currentframe()
    for _ in range(_MAX_FRAMES):
        frame = None if frame is None else frame.f_back
        if frame is None:
            return
        body = frame.f_locals
        # The variables of a class body include the qualified name of the class.
        if "__module__" in body and f"{body.get('__qualname__')}.{name}" == qualified:
            before = body.get(str(name))
            if before is not method and any(hasattr(getattr(before, "__func__", before), mark) for mark in _MARKS):
                raise BadEnvironment(
                    f"{qualified} is defined twice in its class, the second time with @{decorator}; Python would keep "
                    f"only the last one: rename one of them."
                )
            return
