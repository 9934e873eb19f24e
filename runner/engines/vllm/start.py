"""Starts vLLM's `AsyncLLM` in a worker thread, so that everything else goes on meanwhile, and stops it for good."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import inspect
import logging
import multiprocessing
import os
import signal
import subprocess
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

from runner.concurrency.threads import Job, WorkerThread
from runner.engines.vllm.cleanup_process import FOLDER, CleanupProcess, release, shared_memory_of
from runner.engines.vllm.dtypes import choose_dtype, gives_dtype, is_fast
from runner.engines.vllm.engine_folder import SOCKETS, EngineFolder
from runner.engines.vllm.parallel import ParallelSizes, check_machine
from runner.engines.vllm.scheduler_stats import SchedulerStats
from runner.engines.vllm.settings import VllmSettings, choose_settings
from runner.engines.vllm.shutdown_logging import suppress_shutdown_warnings
from runner.engines.vllm.worker import grammar_patch, parent_watch, spin_wait_patch
from runner.engines.vllm.worker.start_phases import read_phase
from runner.errors import BadInput, BadModel, BadOption, one_line
from runner.models import ResolvedModel

__all__ = ["VllmProcess", "import_of_vllm", "require_vllm"]

_CORE, _COORDINATOR = "EngineCore", "VLLM_DP_Coordinator"  # how vLLM names its processes
_WEIGHTS_SHARE = 0.7  # of a CPU machine's memory, for weights; the cache takes up to a sixth
_STOP_SECONDS = 1.0  # vLLM's default takes 3.4 s for an engine that has nothing to do
_VARIABLES = threading.Lock()  # the environment belongs to the process: one engine starts at a time


def require_vllm() -> None:
    """See that vLLM is there, before anything is fetched for it.

    Raises:
        BadModel: it is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise BadModel(
            "vLLM, which models are played on, is not installed: pip install 'deltarunner[cpu]', or 'deltarunner[gpu]' "
            "for CUDA. Without a model `deltarunner check ENV` tries an environment, and ScriptedEngine plays it."
        )


@contextmanager
def import_of_vllm() -> Iterator[None]:
    """Around whatever may import vLLM: its warnings are its own affair, and its log does not go to stdout.

    Blocks, also while an engine is starting.
    """
    with _VARIABLES, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with _environment(_log_variables()):
            yield


@dataclass(slots=True)
class VllmProcess:
    """vLLM's engine and its processes, from start to stop."""

    model: ResolvedModel
    """The model."""
    given: Mapping[str, Any]
    """The engine arguments of the user."""
    kept_dtype: str | None = None
    """The dtype of the run that is resumed, which is taken where the user gave none."""
    dtype_reason: str = ""
    """Why the engine computes in its dtype, where that was chosen for this processor or a resumed run; set by the
    start."""
    stats: SchedulerStats = field(default_factory=SchedulerStats)
    """The counts of vLLM's schedulers."""
    llm: Any = None
    """The `AsyncLLM`, once it was started."""
    settings: VllmSettings | None = None
    """The settings that it was started with; None before."""
    cores: list[BaseProcess] = field(default_factory=list)
    """The processes of the engine cores."""
    folder: EngineFolder | None = None
    """The folder of the files that its processes leave; None before the start."""
    cleanup: CleanupProcess | None = None
    """Who removes what they leave, should this process be killed together with them."""
    _memory: set[str] = field(default_factory=set)  # shared memory of the cores, as it was when they had started
    _given_up: bool = False  # set on the event loop, looked at by the thread that starts
    _thread: WorkerThread | None = None  # where vLLM was started
    _others: list[BaseProcess] | None = None  # vLLM's processes that were there before; set while ours are starting

    async def start(self) -> Any:
        """The `AsyncLLM`, started in a worker thread.

        Cancelling ends the processes that were started.
        """
        try:
            # In a thread that lives until the stop: where vLLM starts Ray (data_parallel_backend="ray"), the kernel
            # kills Ray's processes when the thread that started them ends, and one of a pool ends once it was idle.
            self._thread = WorkerThread()
            await self._thread.call(job := Job(self._start, "the start of vLLM"))
            if job.error is not None:
                raise job.error
            # Cached by vLLM, which would ask at the first request, and wait for ever if an engine core died then.
            await self.llm.get_supported_tasks()
        except BaseException:
            await self.stop()
            raise
        return self.llm

    async def stop(self) -> None:
        """End every process; twice is allowed."""
        with anyio.CancelScope(shield=True), suppress_shutdown_warnings():
            await anyio.to_thread.run_sync(self._stop)
            if self._thread is not None:
                self._thread.end()
                self._thread = None
            handler = getattr(self.llm, "output_handler", None)
            self.llm = None
            if handler is not None:
                await asyncio.wait({handler})

    @property
    def phase(self) -> str:
        """The present phase of the start, for people."""
        if self.settings is None:
            return "importing vLLM"
        return (self.folder and read_phase(self.folder.phase)) or "starting its processes"

    def kill(self) -> None:
        """End the engine cores at once; vLLM notices, and every request ends with an error."""
        for process in self.cores:
            process.kill()

    @property
    def has_lost_a_core(self) -> bool:
        """Whether one of the engine cores has ended; vLLM tells of it only once it has ended the others."""
        # By vLLM's word as well: it learns of an end from a pipe, which closes before there is an exit code.
        return self._first_lost is not None or any(core.exitcode is not None for core in self.cores)

    @property
    def _first_lost(self) -> str | None:
        """The name of the engine core whose end vLLM noticed, and answered by ending the others."""
        manager = getattr(getattr(getattr(self.llm, "engine_core", None), "resources", None), "engine_manager", None)
        return getattr(manager, "failed_proc_name", None)

    def cause_of_death(self) -> str:
        """Why the engine died, in one line."""
        noted = parent_watch.read_failure(self.folder.failures) if self.folder else None
        if noted is not None:
            return noted
        first = self._first_lost
        core = next((core for core in self.cores if core.name == first or (first is None and core.exitcode)), None)
        if core is not None:
            core.join(_STOP_SECONDS)  # it has ended, but perhaps so lately that there is no exit code yet
        if core is None or not core.exitcode:
            return "its process says nothing; see the log"
        rank = parent_watch.rank_named(core.name)
        whose = "its process" if rank is None else f"the process of its data-parallel rank {rank}"
        code = core.exitcode
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        return f"{whose} {how}"

    def _start(self) -> None:
        _refuse_import_by_child()
        self.folder = EngineFolder()
        try:
            self.cleanup = CleanupProcess(self.folder.path)
        except (OSError, subprocess.SubprocessError) as error:
            logging.getLogger("vllm").warning("deltarunner has nobody remove what a killed engine leaves: %s", error)
        with _VARIABLES:
            self._others = _children()
            try:
                self.llm = self._construct()
                if self.cleanup is not None:
                    self.cleanup.engine_started()
            except BadInput:
                raise
            except Exception as error:  # vLLM raises anything; each is about this model and these arguments
                cause = parent_watch.read_failure(self.folder.failures) or one_line(error)
                raise BadModel(f"vLLM cannot run the model {self.model.name!r}: {cause}") from error
            finally:
                started = self._started()
                cores = [each for each in started if each.name.startswith(_CORE)]
                self.cores, self._others = sorted(cores, key=lambda core: core.name), None  # by ranks
                self._memory = self._mapped()
                if self.llm is None:
                    _end(started)  # where vLLM forgot one
                if self._given_up:
                    self._stop()

    def _construct(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # vLLM's own affairs
            with _environment(_log_variables()):  # read when vLLM is imported
                arguments = self._arguments()
            from vllm.usage.usage_lib import UsageContext
            from vllm.v1.engine.async_llm import AsyncLLM

            assert self.settings is not None
            # First, since the tracker's own start unblocks the interrupt.
            resource_tracker.ensure_running()
            with _environment(self._variables(self.settings.environment)), _no_interrupts():
                if self._given_up:
                    raise BadModel(f"the start of {self.model.name!r} was cancelled")
                return AsyncLLM.from_engine_args(
                    arguments, usage_context=UsageContext.LLM_CLASS, stat_loggers=[self.stats.logger()]
                )

    def _arguments(self) -> Any:
        try:
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.platforms import current_platform
        except ImportError as error:
            raise BadModel(
                f"vLLM cannot be imported ({error}): pip install 'deltarunner[cpu]' or 'deltarunner[gpu]'"
            ) from error
        known = frozenset(field.name for field in dataclasses.fields(AsyncEngineArgs))
        cpu = current_platform.is_cpu()
        devices = len(os.sched_getaffinity(0)) if cpu else current_platform.device_count()
        check_machine(self.given, cpu=cpu, devices=devices)
        self.settings = choose_settings(self.given, cpu=cpu, known=known, dtype=self._dtype(cpu=cpu))
        try:
            return AsyncEngineArgs(model=self.model.location, **self.settings.arguments)
        except (TypeError, ValueError) as error:
            raise BadOption(f"VllmEngine: vLLM refuses an engine argument: {one_line(error)}") from error

    def _dtype(self, *, cpu: bool) -> str | None:
        if gives_dtype(self.given):
            return None
        if self.kept_dtype is not None:
            self.dtype_reason = "as the run file has it"
            return self.kept_dtype
        if not cpu:
            return None
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * _WEIGHTS_SHARE
        copies = ParallelSizes.of(self.given).data
        chosen = choose_dtype(self.model.folder, self.given, is_fast=is_fast, memory=int(memory), copies=copies)
        self.dtype_reason = chosen.why
        return chosen.name

    def _variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        assert self.folder is not None
        ours = {
            parent_watch.PARENT: parent_watch.own_process_name(),
            FOLDER: str(self.folder.path),
            parent_watch.FAILURES: str(self.folder.failures),
            SOCKETS: str(self.folder.path),
        }
        if allowed := os.environ.get("VLLM_PLUGINS"):  # a list that would keep ours out
            ours["VLLM_PLUGINS"] = ",".join(
                [allowed, *(each.ENTRY_POINT for each in (parent_watch, spin_wait_patch, grammar_patch))]
            )
        return {**_log_variables(), **environment, **ours}

    def _stop(self) -> None:
        self._given_up = True
        memory = self._memory | self._mapped()  # of a core that died nothing can be asked any more
        if self.llm is not None:
            named = {"timeout": _STOP_SECONDS} if "timeout" in inspect.signature(self.llm.shutdown).parameters else {}
            self.llm.shutdown(**named)
        # Still starting: without its processes vLLM's constructor fails, and cleans up after itself.
        for process in self._started():
            process.kill()
        for process in self.cores:
            process.join(_STOP_SECONDS)  # else it stays a zombie for as long as we live
        release(memory)
        if self.folder is not None:
            self.folder.remove()
        if self.cleanup is not None:
            self.cleanup.dismiss()

    def _mapped(self) -> set[str]:
        return {name for core in self.cores if core.pid for name in shared_memory_of(core.pid)}

    def _started(self) -> list[BaseProcess]:
        others = self._others
        return [] if others is None else [process for process in _children() if process not in others]


def _children() -> list[BaseProcess]:
    """The engine cores of this process, and what counts their requests where there are several."""
    return [each for each in multiprocessing.active_children() if each.name.startswith((_CORE, _COORDINATOR))]


def _end(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.kill()
        process.join(_STOP_SECONDS)


def _log_variables() -> dict[str, str]:
    """Sends vLLM's log to stderr: stdout belongs to the program that it runs in."""
    ours = {"VLLM_LOGGING_STREAM": "ext://sys.stderr"}
    return {name: value for name, value in ours.items() if name not in os.environ}


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """What this thread starts does not see the terminal's Ctrl-C: the mask is inherited."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _refuse_import_by_child() -> None:
    """End a process of vLLM that imports the user's script, and with it would start an engine of its own."""
    if not getattr(multiprocessing.current_process(), "_inheriting", False):
        return
    text = (
        "the script starts the engine while it is imported, and vLLM's processes import it: "
        "put what it runs under `if __name__ == '__main__':`"
    )
    noted = os.environ.get(parent_watch.FAILURES)
    if noted:
        parent_watch.note_failure(Path(noted), text)
    raise SystemExit(1)
