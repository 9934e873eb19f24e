"""The shared memories with weights that this process has not freed."""

from __future__ import annotations

import os
from collections.abc import Iterator

NAME = "deltarunner-weights"


def open_memories() -> Iterator[str]:
    """Return the link of each state dict of this process that is not freed."""
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            link = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue
        if NAME in link:
            yield link
