"""Start of vLLM's processes in tests: each is forked from a process that has imported vLLM already.

An import of vLLM takes ten seconds of processor time, and a spawned process repeats it. vLLM's API server forks its
processes in this way too. Users' engines are spawned. The reason is the cleanup process: it reads the environment
variables of its engine in `/proc`, and there a forked process has the variables of the process that forks it. So the
tests of the cleanup process spawn their engines.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.context import BaseContext, ForkServerContext, ForkServerProcess
from typing import Final

import psutil

from runner.engines.vllm.start import contained_vllm

__all__ = ["end_forking", "fork_engines"]

PRELOADED: Final = [
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
]


class ForkedProcess(ForkServerProcess):
    """A forked process that gets the environment variables that its parent has at the start of the process."""

    def start(self) -> None:
        self.environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        os.environ.clear()
        os.environ.update(self.environment)
        super().run()


class ForkingContext(ForkServerContext):
    Process = ForkedProcess


def fork_engines(*, forks: bool) -> None:
    """Choose how vLLM's processes start from now on in this process. Imports vLLM."""
    with contained_vllm():
        from vllm.v1.engine import coordinator, utils

    if not isinstance(utils.get_mp_context, _ChosenContext):
        coordinator.get_mp_context = utils.get_mp_context = _ChosenContext(utils.get_mp_context)
    utils.get_mp_context.forks = forks


def end_forking() -> None:
    """End the process that forks, since other tests look for processes that are left.

    It stays if an engine that it started still runs: it would wait for this engine, which a fixture of the module has.
    """
    pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]  # private
    if pid is not None and not psutil.Process(pid).children():
        forkserver._forkserver._stop()  # type: ignore[attr-defined]  # private; without this call it ends with this process


class _ChosenContext:
    def __init__(self, as_asked: Callable[[], BaseContext]) -> None:
        self._as_asked = as_asked
        self._forking = ForkingContext()
        self._forking.set_forkserver_preload(PRELOADED)
        self.forks = False

    def __call__(self) -> BaseContext:
        return self._forking if self.forks else self._as_asked()
