"""Start and stop of vLLM's `AsyncLLM`, in a worker thread."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import inspect
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread

from runner.concurrency.threads import Job, WorkerThread
from runner.engines.vllm.cleanup_process import FOLDER, CleanupProcess, release, shared_memory_of
from runner.engines.vllm.dtypes import choose_dtype, gives_dtype, is_fast, machine_memory
from runner.engines.vllm.mistral_format import chosen_load_format
from runner.engines.vllm.parallel import ParallelSizes, check_machine
from runner.engines.vllm.scheduler_stats import SchedulerStats
from runner.engines.vllm.settings import VllmSettings, choose_settings
from runner.engines.vllm.worker import grammar_patch, parent_watch, spin_wait_patch
from runner.engines.vllm.worker.start_phases import read_phase
from runner.errors import BadInput, BadModel, BadOption, one_line
from runner.logs import logger_for
from runner.models import ResolvedModel

__all__ = ["SOCKETS", "EngineFolder", "VllmProcess", "contained_vllm", "require_vllm", "suppress_shutdown_warnings"]

_log = logger_for("engines")

SOCKETS: Final = "VLLM_RPC_BASE_PATH"
"""Environment variable with the folder for vLLM's sockets."""

_PREFIX: Final = "deltarunner-engine-"
_MAX_PATH_BYTES: Final = 107 - len(f"{_PREFIX}12345678/") - len(f"{'/'}12345678-1234-1234-1234-123456789abc")
"""Maximum length in bytes of the path of an engine folder's parent; the path of a socket has at most 107 bytes."""


class EngineFolder:
    """Private folder of an engine, for the sockets of vLLM's processes and their failure notes.

    By default vLLM binds its sockets in the folder for temporary files, and the sockets of a killed process stay there.
    This folder is removed when the engine is stopped, or by the cleanup process if this process is killed.
    """

    def __init__(self) -> None:
        around = os.environ.get(SOCKETS) or tempfile.gettempdir()
        if len(os.fsencode(around)) > _MAX_PATH_BYTES:
            around = "/tmp"
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=around)).absolute()

    @property
    def failures(self) -> Path:
        """File in which processes of the engine write their fatal errors."""
        return self.path / "failures"

    @property
    def phase(self) -> Path:
        """File in which processes of the engine write the phase of their start."""
        return self.path / "phase"

    def remove(self) -> None:
        """Delete the folder and its content; idempotent."""
        shutil.rmtree(self.path, ignore_errors=True)


@contextmanager
def suppress_shutdown_warnings() -> Iterator[None]:
    """Suppress vLLM's shutdown warnings in this process while an engine is stopped."""
    with ExitStack() as stack:
        for handler in _handlers(logging.getLogger("vllm")):
            handler.addFilter(_unexpected)
            stack.callback(handler.removeFilter, _unexpected)
        yield


def _handlers(logger: logging.Logger | None) -> Iterator[logging.Handler]:
    while logger is not None:
        yield from logger.handlers
        logger = logger.parent if logger.propagate else None


def _unexpected(record: logging.LogRecord) -> bool:
    """Return False for a warning of a usual shutdown: it has an `EngineDeadError`, or begins with "[shutdown]"."""
    if record.levelno < logging.WARNING:
        return True
    error = record.exc_info[0] if record.exc_info else None
    died = error is not None and error.__name__ == "EngineDeadError"
    return not died and not record.getMessage().startswith("[shutdown]")


_CORE, _COORDINATOR = "EngineCore", "VLLM_DP_Coordinator"  # names of vLLM's processes
_WEIGHTS_SHARE = 0.7  # share of a CPU machine's memory for weights; the cache takes up to a sixth
_STOP_SECONDS = 1.0  # vLLM's default takes 3.4 s for an engine that has nothing to do
_LOADED = ("LD_PRELOAD", "LD_LIBRARY_PATH")
"""Environment variables that list libraries to load. vLLM changes them for its processes. If they were not restored,
programs that an agent's environment starts later would load these libraries too."""
_VARIABLES = threading.Lock()  # environment variables belong to the process: only one engine starts at a time


def require_vllm() -> None:
    """Check that vLLM is installed, before anything is downloaded.

    Raises:
        BadModel: vLLM is not installed.
    """
    if importlib.util.find_spec("vllm") is None:
        raise BadModel(
            "vLLM, which runs the models, is not installed: pip install 'deltarunner[cpu]', or 'deltarunner[gpu]' "
            "for CUDA. Without a model `deltarunner check ENV` tries an environment, and ScriptedEngine runs it."
        )


@contextmanager
def contained_vllm() -> Iterator[None]:
    """Limit what vLLM changes in this process while the block imports or configures vLLM.

    vLLM's warnings are suppressed, its log goes to stderr, and the environment variables that list libraries to load
    are restored at the end. The thread first waits until no other engine is starting.
    """
    with _VARIABLES, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with _environment(_log_variables()), _kept(_LOADED):
            yield


@dataclass(slots=True)
class VllmProcess:
    """vLLM's `AsyncLLM` and its processes, from start to stop."""

    model: ResolvedModel
    given: Mapping[str, Any]
    """The user's engine arguments."""
    kept_dtype: str | None = None
    """Dtype of the resumed run, used if the user has chosen none; None if no run is resumed."""
    dtype_reason: str = ""
    """Reason for the dtype, if the start chose it for this processor or for a resumed run; else ""."""
    stats: SchedulerStats = field(default_factory=SchedulerStats)
    """Counts of vLLM's schedulers."""
    llm: Any = None
    """The `AsyncLLM` after the start."""
    settings: VllmSettings | None = None
    """Settings with which vLLM starts; None before they are chosen."""
    cores: list[BaseProcess] = field(default_factory=list)
    """Processes of the engine cores."""
    folder: EngineFolder | None = None
    """Folder for files of vLLM's processes; None before the start."""
    cleanup: CleanupProcess | None = None
    """Process that removes leftovers if this process and vLLM's processes are killed; None if it was not started."""
    _memory: set[str] = field(default_factory=set)  # names of the cores' shared memory after their start
    _given_up: bool = False  # set by `_stop`, and read by the thread that starts vLLM
    _thread: WorkerThread | None = None  # the thread that started vLLM
    _others: list[BaseProcess] | None = None  # vLLM processes that ran before the start; None except during the start

    async def start(self) -> Any:
        """Start the `AsyncLLM` in a worker thread, and return it.

        An error or a cancellation ends vLLM's processes.

        Raises:
            BadModel: vLLM is not usable, or cannot run the model.
            BadOption: an engine argument is invalid.
        """
        try:
            # The kernel kills Ray's processes (data_parallel_backend="ray") when the thread that started them ends. So
            # this thread runs until the stop; a thread of a pool would end when it is idle.
            self._thread = WorkerThread()
            await self._thread.call(job := Job(self._start, "the start of vLLM"))
            if job.error is not None:
                raise job.error
            # This fills a cache of vLLM. Otherwise the first request would ask the engine core, and wait forever if it
            # is dead.
            await self.llm.get_supported_tasks()
        except BaseException:
            await self.stop()
            raise
        return self.llm

    async def stop(self) -> None:
        """End every process of vLLM; idempotent."""
        with anyio.CancelScope(shield=True), suppress_shutdown_warnings():
            try:
                await anyio.to_thread.run_sync(self._stop)
            finally:
                if self._thread is not None:
                    self._thread.end()
                    self._thread = None
                handler = getattr(self.llm, "output_handler", None)
                self.llm = None
                if handler is not None:
                    handler.cancel()  # vLLM cancels it too, unless its shutdown fails
                    await asyncio.wait({handler})

    @property
    def phase(self) -> str:
        """Current phase of the start, as text for the user."""
        if self.settings is None:
            return "importing vLLM"
        return (self.folder and read_phase(self.folder.phase)) or "starting its processes"

    def kill(self) -> None:
        """Kill the engine cores. vLLM detects this, and every request ends with an error."""
        for process in self.cores:
            process.kill()

    @property
    def has_lost_a_core(self) -> bool:
        """True if an engine core ended. vLLM reports this only after it has ended the other cores."""
        # vLLM's own record is checked too. vLLM detects the end of a core by a pipe, which closes before the core has
        # an exit code.
        return self._first_lost is not None or any(core.exitcode is not None for core in self.cores)

    @property
    def _first_lost(self) -> str | None:
        """Name of the engine core whose end made vLLM end the others; None if vLLM has recorded no such core."""
        manager = getattr(getattr(getattr(self.llm, "engine_core", None), "resources", None), "engine_manager", None)
        return getattr(manager, "failed_proc_name", None)

    def cause_of_death(self) -> str:
        """Return the cause of the engine's death, in one line."""
        noted = parent_watch.read_failure(self.folder.failures) if self.folder else None
        if noted is not None:
            return noted
        first = self._first_lost
        core = next((core for core in self.cores if core.name == first or (first is None and core.exitcode)), None)
        if core is not None:
            core.join(_STOP_SECONDS)  # the process ended, but may have no exit code yet
        if core is None or not core.exitcode:
            return "its process left no reason; see the log"
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
            _log.warning("cannot start the cleanup process: %s", error)
        with _VARIABLES:
            self._others = _children()
            try:
                self.llm = self._construct()
                if self.cleanup is not None:
                    self.cleanup.engine_started()
            except BadInput:
                raise
            except Exception as error:  # vLLM may raise any exception about the model or its arguments
                cause = parent_watch.read_failure(self.folder.failures) or one_line(error)
                raise BadModel(f"vLLM cannot run the model {self.model.name!r}: {cause}") from error
            finally:
                started = self._started()
                cores = [each for each in started if each.name.startswith(_CORE)]
                self.cores, self._others = sorted(cores, key=lambda core: core.name), None  # sorted by rank
                self._memory = self._mapped()
                if self.llm is None:
                    _end(started)  # vLLM may not have ended all of its processes
                if self._given_up:
                    self._stop()

    def _construct(self) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # vLLM's warnings
            with _environment(_log_variables()), _kept(_LOADED):  # vLLM reads log variables at its import
                arguments = self._arguments()
            from vllm.usage.usage_lib import UsageContext
            from vllm.v1.engine.async_llm import AsyncLLM

            assert self.settings is not None
            # Python's resource tracker is started before SIGINT is blocked, since its start unblocks SIGINT.
            resource_tracker.ensure_running()
            with _environment(self._variables(self.settings.environment)), _kept(_LOADED), _no_interrupts():
                if self._given_up:
                    raise BadModel(f"the start of {self.model.name!r} was cancelled")
                if self.given.get("enable_lora"):
                    self._refuse_adapters_on_experts(arguments)
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
        dtype, load_format = self._dtype(cpu=cpu), chosen_load_format(self.model.folder)
        self.settings = choose_settings(self.given, cpu=cpu, known=known, dtype=dtype, load_format=load_format)
        try:
            return AsyncEngineArgs(model=self.model.location, **self.settings.arguments)
        except (TypeError, ValueError) as error:
            raise BadOption(f"VllmEngine: vLLM refuses an engine argument: {one_line(error)}") from error

    def _refuse_adapters_on_experts(self, arguments: Any) -> None:
        """Check that vLLM can apply adapters to this model.

        Raises:
            BadModel: the model has experts, and vLLM runs on a CPU without Triton. The first turn would fail.
        """
        from vllm.platforms import current_platform
        from vllm.triton_utils import HAS_TRITON

        if current_platform.is_cpu() and not HAS_TRITON and arguments.create_model_config().is_moe:
            raise BadModel(
                f"vLLM cannot run the model {self.model.name!r}: vLLM supports adapters on experts only on GPUs; "
                "leave out enable_lora on a CPU"
            )

    def _dtype(self, *, cpu: bool) -> str | None:
        if gives_dtype(self.given):
            return None
        if self.kept_dtype is not None:
            self.dtype_reason = "as in the run file"
            return self.kept_dtype
        if not cpu:
            return None
        memory = machine_memory() * _WEIGHTS_SHARE
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
        if allowed := os.environ.get("VLLM_PLUGINS"):  # the user allows only these plugins
            ours["VLLM_PLUGINS"] = ",".join(
                [allowed, *(each.ENTRY_POINT for each in (parent_watch, spin_wait_patch, grammar_patch))]
            )
        return {**_log_variables(), **environment, **ours}

    def _stop(self) -> None:
        self._given_up = True
        memory = self._memory | self._mapped()  # the system no longer lists the memory of a dead core
        try:
            if self.llm is not None:
                _shut_down(self.llm)
        finally:
            # If vLLM is still starting, its constructor fails without these processes, and cleans up.
            for process in self._started():
                process.kill()
            for process in self.cores:
                process.kill()  # without effect if vLLM has ended it
                process.join(_STOP_SECONDS)  # a process that is not joined stays a zombie until this process ends
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


def _shut_down(llm: Any) -> None:
    """Shut vLLM down. Its processes have `_STOP_SECONDS` to end; then vLLM kills them."""
    from psutil import NoSuchProcess  # installed with vLLM

    named = {"timeout": _STOP_SECONDS} if "timeout" in inspect.signature(llm.shutdown).parameters else {}
    try:
        llm.shutdown(**named)
    except NoSuchProcess:  # a process ended just before vLLM killed it, and this error left vLLM's sockets open
        llm.engine_core.resources()
        llm.shutdown(**named)


def _children() -> list[BaseProcess]:
    """Return the child processes of this process that are engine cores or coordinators of data-parallel ranks."""
    return [each for each in multiprocessing.active_children() if each.name.startswith((_CORE, _COORDINATOR))]


def _end(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.kill()
        process.join(_STOP_SECONDS)


def _log_variables() -> dict[str, str]:
    """Return the environment variable that sends vLLM's log to stderr, since stdout belongs to the program.

    The result is empty if the user has set this variable.
    """
    ours = {"VLLM_LOGGING_STREAM": "ext://sys.stderr"}
    return {name: value for name, value in ours.items() if name not in os.environ}


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    with _kept(variables):
        os.environ.update(variables)
        yield


@contextmanager
def _kept(names: Iterable[str]) -> Iterator[None]:
    """Restore the environment variables of these names at the end of the block."""
    before = {name: os.environ.get(name) for name in names}
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
    """Block SIGINT in this block, so that processes started in it do not receive the terminal's Ctrl-C."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _refuse_import_by_child() -> None:
    """End this process if it is a process of vLLM that imports the user's script and so would start another engine.

    Raises:
        SystemExit: this process is such a process.
    """
    if not getattr(multiprocessing.current_process(), "_inheriting", False):
        return
    text = (
        "the script starts the engine when it is imported, and vLLM's processes import it: "
        "put its code under `if __name__ == '__main__':`"
    )
    noted = os.environ.get(parent_watch.FAILURES)
    if noted:
        parent_watch.note_failure(Path(noted), text)
    raise SystemExit(1)
