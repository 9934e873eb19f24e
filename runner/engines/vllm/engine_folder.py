"""A folder of one engine's own: vLLM's processes meet at sockets in it, and note there what they die of.

VLLM binds its sockets in the folder for temporary files, under names that nobody can tell from others', and those of a
process that was killed stay for ever.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

__all__ = ["SOCKETS", "EngineFolder"]

SOCKETS: Final = "VLLM_RPC_BASE_PATH"
"""The variable that names the folder where vLLM binds its sockets."""

_PREFIX: Final = "deltarunner-engine-"
_MAX_PATH_BYTES: Final = 107 - len(f"{_PREFIX}12345678/") - len(f"{'/'}12345678-1234-1234-1234-123456789abc")
"""Bytes of the folder around it: the address of a socket has no room for more."""


class EngineFolder:
    """The folder; it goes when the engine is stopped, and where this process is killed, by its cleanup."""

    def __init__(self) -> None:
        around = os.environ.get(SOCKETS) or tempfile.gettempdir()
        if len(os.fsencode(around)) > _MAX_PATH_BYTES:
            around = "/tmp"
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=around)).absolute()
        """Where it is."""

    @property
    def failures(self) -> Path:
        """The file in which processes of the engine note what they die of."""
        return self.path / "failures"

    @property
    def phase(self) -> Path:
        """The file in which they note what the start is doing."""
        return self.path / "phase"

    def remove(self) -> None:
        """Delete it with all that is in it; twice is allowed."""
        shutil.rmtree(self.path, ignore_errors=True)
