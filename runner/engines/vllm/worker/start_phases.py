"""Phases of an engine's start, which its processes write to a file."""

from __future__ import annotations

import functools
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

__all__ = ["PHASES", "patch_start_phases", "read_phase"]

PHASES: Final = {
    "load_model": "loading the weights",
    "determine_available_memory": "compiling and measuring memory",
    "compile_or_warm_up_model": "warming up and capturing CUDA graphs",
}
"""Phase of the start, by the name of the worker's method that vLLM calls in this phase."""

_ON_CPU: Final = {"determine_available_memory": "measuring memory", "compile_or_warm_up_model": "warming up"}


def patch_start_phases(path: Path) -> None:
    """Patch vLLM's worker in this process to note its phases in a file; do nothing before the worker is imported.

    Args:
        path: the file, which contains only the last phase.
    """
    module = sys.modules.get("vllm.v1.worker.worker_base")
    wrapper = getattr(module, "WorkerWrapperBase", None)
    asked = getattr(wrapper, "__getattr__", None)
    if wrapper is None or asked is None or hasattr(asked, "notes"):
        return

    @functools.wraps(asked)
    def noted(worker: Any, name: str) -> Any:
        if name in PHASES:
            phase = PHASES[name] if _on_gpu() else _ON_CPU.get(name, PHASES[name])
            with suppress(OSError):  # the engine's folder was removed
                path.write_text(phase, encoding="utf-8")
        return asked(worker, name)

    vars(noted)["notes"] = True
    wrapper.__getattr__ = noted


def read_phase(path: Path) -> str:
    """Return the last phase in the file; "" before the first one."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _on_gpu() -> bool:
    from vllm.platforms import current_platform

    return not current_platform.is_cpu()
