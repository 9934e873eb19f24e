"""Private folder of one engine, for the sockets of vLLM's processes and their failure notes.

By default vLLM binds its sockets in the folder for temporary files, under random names, and those of a killed process
stay for ever.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Final

__all__ = ["SOCKETS", "EngineFolder"]

SOCKETS: Final = "VLLM_RPC_BASE_PATH"
"""Environment variable with the folder for vLLM's sockets."""

_PREFIX: Final = "deltarunner-engine-"
_MAX_PATH_BYTES: Final = 107 - len(f"{_PREFIX}12345678/") - len(f"{'/'}12345678-1234-1234-1234-123456789abc")
"""Maximum length of the parent folder's path in bytes; the address of a socket is limited."""


class EngineFolder:
    """Folder of an engine; removed when the engine is stopped, or by the cleanup process if this process is killed."""

    def __init__(self) -> None:
        around = os.environ.get(SOCKETS) or tempfile.gettempdir()
        if len(os.fsencode(around)) > _MAX_PATH_BYTES:
            around = "/tmp"
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=around)).absolute()
        """Path of the folder."""

    @property
    def failures(self) -> Path:
        """File in which processes of the engine note their fatal error."""
        return self.path / "failures"

    @property
    def phase(self) -> Path:
        """File in which they note the phase of the start."""
        return self.path / "phase"

    def remove(self) -> None:
        """Delete the folder and its content; idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)
