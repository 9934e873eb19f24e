"""Replacement of `${NAME}` in configuration files by environment variables, so that the files need no secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["filled"]

_REFERENCE: Final = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")


def filled(table: Mapping[str, Any], name: str) -> dict[str, str]:
    """Return the texts of a table with `${NAME}` and `${NAME:-default}` replaced by environment variables.

    Args:
        table: the texts by key.
        name: the name of the table, for error messages.

    Raises:
        ValueError: a variable without a default is not set; the message names the variable and the table.
    """

    def value(match: re.Match[str]) -> str:
        found = os.environ.get(match[1], match[2])
        if found is None:
            raise ValueError(f"{name} needs the variable {match[1]}, which is not set: export it")
        return found

    return {str(key): _REFERENCE.sub(value, str(text)) for key, text in table.items()}
