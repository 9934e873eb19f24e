"""Control of vLLM on a stand-in for vLLM: an old one, a hung one, a dead one, and one that fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import anyio
import pytest
from anyio.lowlevel import checkpoint

from runner.engines.base import Delta, FinishReason, GenerationRequest
from runner.engines.gate import AdmissionGate
from runner.engines.state import EngineState, PauseMode
from runner.engines.vllm.engine import VllmEngine
from runner.engines.vllm.runtime import VllmRuntime
from runner.engines.vllm.settings import choose_settings
from runner.engines.vllm.start import VllmProcess
from runner.engines.vllm.stream import VllmStream
from runner.errors import BadControl, BadWeights, EngineDead, EngineError
from runner.options import Sampling
from runner.testing import cancel_everywhere
from runner.tokens.log import VersionSpan

pytestmark = pytest.mark.anyio

WATCHDOG_SECONDS = 600.0


class Collector:
    """Stand-in for vLLM's collector, which stores unread outputs."""

    def __init__(self) -> None:
        self.request_id = "r"
        self.output: Any = None
        self._changed = anyio.Event()

    def send(self, *ids: int, finish: str | None = None) -> None:
        held = self.output.outputs[0].token_ids if self.output is not None else []
        completion = SimpleNamespace(
            token_ids=[*held, *ids],
            logprobs=SimpleNamespace(logprobs=[-1.0] * (len(held) + len(ids))),
            finish_reason=finish,
            stop_reason=None,
        )
        self.output = SimpleNamespace(outputs=[completion], finished=finish is not None, num_cached_tokens=0)
        self.notify()

    def fail(self, error: Exception) -> None:
        self.output = error
        self.notify()

    def notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()

    def get_nowait(self) -> Any:
        output, self.output = self.output, None
        if isinstance(output, Exception):
            raise output
        return output

    async def get(self) -> Any:
        while self.output is None:
            await self._changed.wait()
        return self.get_nowait()

    def close(self) -> None: ...


class Llm:
    """Stand-in that records calls in order; it answers at once, or as configured."""

    def __init__(self, *, kind: str = "cpu", sleep_mode: bool = False, profiler: str | None = None) -> None:
        self.errored = False
        self.asked: list[str] = []
        self.hangs = self.fails = ""
        self.reset = True
        self.collectors: list[Collector] = []
        self.engine_core = SimpleNamespace(resources=SimpleNamespace(engine_manager=SimpleNamespace()))
        self.vllm_config = SimpleNamespace(
            device_config=SimpleNamespace(device_type=kind),
            model_config=SimpleNamespace(enable_sleep_mode=sleep_mode),
            parallel_config=SimpleNamespace(world_size=2, data_parallel_size=2),
            profiler_config=SimpleNamespace(profiler=profiler),
        )

    async def _asked(self, what: str, name: str, result: Any = None) -> Any:
        self.asked.append(what)
        await checkpoint()
        if self.errored:
            raise RuntimeError("EngineCore encountered an issue")
        if name == self.fails:
            raise Exception(f"Call to {name} method failed:\n  no reason")  # vLLM's message is this short
        if name == self.hangs:
            await anyio.sleep_forever()
        return result

    async def add_request(self, *given: Any, **named: Any) -> Collector:
        self.collectors.append(Collector())
        return self.collectors[-1]

    async def abort(self, name: str, internal: bool = False) -> None:
        for collector in self.collectors:
            collector.send(finish="abort")

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        assert not clear_cache
        await self._asked(f"pause {mode}", "pause")
        if mode == "abort":
            await self.abort("all")

    async def resume_generation(self) -> None:
        await self._asked("resume", "resume")

    async def collective_rpc(self, method: str, *, kwargs: dict[str, Any]) -> list[str]:
        await self._asked(f"{method} {kwargs}", "load")
        return ["GPU-1", "GPU-2"] if method == "device_name" else []

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        also = " connector=True" if reset_connector else ""
        answer: bool = await self._asked(f"reset running={reset_running_requests}{also}", "reset", self.reset)
        return answer

    async def sleep(self, level: int) -> None:
        await self._asked(f"sleep {level}", "sleep")

    async def wake_up(self, tags: list[str]) -> None:
        await self._asked(f"wake {tags}", "wake")

    async def start_profile(self) -> None:
        await self._asked("start profile", "profile")

    async def stop_profile(self) -> None:
        await self._asked("stop profile", "profile")


class NewLlm(Llm):
    """vLLM 0.32, which records weight versions."""

    async def update_weight_version(self, version: str) -> None:
        await self._asked(f"version {version}", "version")


class Core:
    """A process that can be ended."""

    exitcode: int | None = None

    def __init__(self, llm: Llm, name: str = "EngineCore") -> None:
        self.llm = llm
        self.name = name

    def join(self, timeout: float) -> None:
        if self.name == getattr(self.llm.engine_core.resources.engine_manager, "failed_proc_name", None):
            self.exitcode = -9  # not before the join, as if the system were still removing the process

    def kill(self) -> None:
        self.llm.errored = True
        for collector in self.llm.collectors:
            collector.fail(RuntimeError("EngineCore encountered an issue"))


class Weights:
    """Weights whose folder is only a name."""

    def __init__(self, llm: Llm) -> None:
        self.llm = llm

    async def check(self, source: Any) -> Any:
        await checkpoint()
        if source == "wrong":
            raise BadWeights("the tensor 'a' is missing")
        return source

    async def load(self, checked: Any) -> None:
        await self.llm.collective_rpc("reload_weights", kwargs={"weights_path": checked})


def engine_of(llm: Llm) -> VllmEngine:
    """Return an engine that its control treats as entered."""
    engine = VllmEngine("nothing")
    process = VllmProcess(SimpleNamespace(name="nothing"), {})  # type: ignore[arg-type]  # never started
    process.cores = [Core(llm)]  # type: ignore[list-item]  # it can be ended, and no more is called
    engine.runtime = VllmRuntime(
        process,
        llm,
        Weights(llm),  # type: ignore[arg-type]  # has the two methods that are called
        gate=AdmissionGate(4, 10_000),
        context=100,
        as_vllm=lambda _: (None, None),
        version="0",
    )
    engine.running = True
    return engine


def request(**fields: Any) -> GenerationRequest:
    sampling = dataclasses.replace(Sampling.defaults(), max_tokens=50)
    return GenerationRequest(name="e/main/0", prompt=[1, 2, 3], sampling=sampling, **fields)


async def read(stream: VllmStream, into: list[Delta]) -> None:
    async with stream:
        async for delta in stream:
            into.append(delta)  # noqa: PERF401  # deltas before an error are kept


# --- versions


async def test_vllm_without_versions_gets_recorded_ones() -> None:
    llm = Llm()
    engine = engine_of(llm)
    async with engine.stream(request()) as stream:
        (collector,) = llm.collectors
        collector.send(1, 2, 3)
        assert list((await anext(stream)).token_ids) == [1, 2, 3]
        collector.send(4, 5)  # sampled by the old weights, and unread
        await engine.update_weights("new")
        collector.send(6)
        assert list((await anext(stream)).token_ids) == [4, 5, 6]
        await engine.update_weights("newer", version="v2")
        await engine.update_weights("newest", version="v3")
        collector.send(7, 8, finish="length")
        await anext(stream)
    assert stream.finish is not None
    assert stream.finish.versions == (VersionSpan("0", 0, 5), VersionSpan("1", 5, 6), VersionSpan("v3", 6, 8))
    async with engine.stream(request()) as stream:
        llm.collectors[-1].send(1, finish="length")
        await anext(stream)
    assert stream.finish is not None
    assert stream.finish.versions == (VersionSpan("v3", 0, 1),)


@pytest.mark.parametrize(("kind", "stamped"), [(Llm, []), (NewLlm, ["version 1"])], ids=["before 0.32", "0.32"])
async def test_update_makes_its_calls_in_the_right_order(kind: type[Llm], stamped: list[str]) -> None:
    llm = kind()
    engine = engine_of(llm)
    await engine.update_weights("folder")
    assert llm.asked == [
        "pause keep",
        "reload_weights {'weights_path': 'folder'}",
        *stamped,
        "reset running=True",
        "resume",
    ]
    assert engine.weight_version == "1"


# --- failures


async def test_weights_that_do_not_fit_touch_nothing() -> None:
    llm = Llm()
    engine = engine_of(llm)
    with pytest.raises(BadWeights, match="'a' is missing"):
        await engine.update_weights("wrong")
    assert (llm.asked, engine.state, engine.weight_version) == ([], EngineState.RUNNING, "0")


@pytest.mark.parametrize("fails", ["load", "version", "reset", "a reset that says False"])
async def test_failed_load_has_one_cause_for_all_requests(fails: str) -> None:
    llm = NewLlm()
    engine = engine_of(llm)
    llm.fails, llm.reset = fails, "False" not in fails
    deaths: list[str] = []

    async def ask() -> None:
        with pytest.raises(EngineDead) as caught:
            await read(engine.stream(request()), [])
        deaths.append(str(caught.value))

    with anyio.fail_after(WATCHDOG_SECONDS):
        async with anyio.create_task_group() as group:
            for _ in range(6):  # two of them wait at the gate
                group.start_soon(ask)
            await anyio.wait_all_tasks_blocked()
            with pytest.raises(EngineDead, match="the weights '1' could not be loaded: ") as caught:
                await engine.update_weights("new")
        await ask()
    assert deaths == [str(caught.value)] * 7
    assert (engine.is_alive(), engine.weight_version) == (False, "0")
    assert (engine.stats().open, engine.stats().waiting, engine.vllm.gate.inside) == (0, 0, 0)
    for control in (engine.resume, engine.health):
        with pytest.raises(EngineDead, match="the weights '1' could not be loaded"):
            await control()


@pytest.mark.parametrize("what", ["sleep", "wake"])
async def test_memory_that_was_given_up_by_half_ends_the_engine(what: str) -> None:
    llm = Llm()
    engine = engine_of(llm)
    llm.fails = what

    async def both() -> None:
        await engine.sleep()
        await engine.wake()

    with pytest.raises(EngineDead, match="it could not be "):
        await both()
    assert not engine.is_alive()


async def test_a_pause_that_vllm_refuses_is_undone() -> None:
    llm = Llm()
    engine = engine_of(llm)
    llm.fails = "pause"
    with pytest.raises(EngineError, match="Call to pause method failed: no reason") as caught:
        await engine.pause("keep")
    assert not isinstance(caught.value, EngineDead)
    assert (llm.asked, engine.state) == (["pause keep", "resume"], EngineState.RUNNING)


CALLS: list[Any] = [
    pytest.param(lambda e: e.pause("keep"), "pause", id="pause"),
    pytest.param(lambda e: e.pause("abort"), "pause", id="pause abort"),
    pytest.param(lambda e: e.update_weights("new"), "load", id="load"),
    pytest.param(lambda e: e.update_weights("new"), "resume", id="resume"),
    pytest.param(lambda e: e.reset_prefix_cache(), "reset", id="reset"),
    pytest.param(lambda e: e.sleep(), "sleep", id="sleep"),
    pytest.param(lambda e: e.start_profile(), "profile", id="profile"),
]


@pytest.mark.parametrize(("call", "hangs"), CALLS)
async def test_no_call_waits_for_an_engine_that_is_dead(
    call: Callable[[VllmEngine], Awaitable[None]], hangs: str
) -> None:
    llm = Llm(profiler="torch")
    engine = engine_of(llm)
    llm.hangs = hangs

    async def kill() -> None:
        await anyio.wait_all_tasks_blocked()
        engine.vllm.process.kill()

    with anyio.fail_after(WATCHDOG_SECONDS):
        async with anyio.create_task_group() as group:
            group.start_soon(kill)
            with pytest.raises(EngineDead):
                await call(engine)
    assert not engine.is_alive()


async def test_waiting_for_turns_to_end_does_not_outlive_the_engine() -> None:
    llm = Llm()
    engine = engine_of(llm)

    async def pause() -> None:
        with pytest.raises(EngineDead):
            await engine.pause("wait")

    with anyio.fail_after(WATCHDOG_SECONDS):
        async with anyio.create_task_group() as group, engine.stream(request()):  # no task reads the stream
            group.start_soon(pause)
            await anyio.wait_all_tasks_blocked()
            engine.vllm.process.kill()
            await anyio.wait_all_tasks_blocked()


# --- turns during sampling


async def test_dead_rank_is_named_before_vllm_reports_it() -> None:
    llm = Llm()
    engine = engine_of(llm)
    engine.vllm.process.llm = llm
    engine.vllm.process.cores = [Core(llm, f"EngineCore_DP{rank}") for rank in (0, 1)]  # type: ignore[misc]  # as above
    stream = engine.stream(request())
    with anyio.fail_after(WATCHDOG_SECONDS):
        async with stream:
            llm.collectors[0].send(7)
            assert (await anext(stream)).token_ids == [7]
            # vLLM detects the death at a pipe and ends the other rank, which aborts its request.
            llm.engine_core.resources.engine_manager.failed_proc_name = "EngineCore_DP1"
            llm.collectors[0].send(finish="abort")
            with pytest.raises(EngineDead, match="its data-parallel rank 1 was ended by SIGKILL"):
                await anext(stream)
    assert stream.finish is not None
    assert stream.finish.reason is FinishReason.ERROR


async def test_wait_asks_vllm_only_once_the_last_turn_was_sent() -> None:
    llm = Llm()
    engine = engine_of(llm)
    got: list[Delta] = []
    with anyio.fail_after(WATCHDOG_SECONDS):
        async with anyio.create_task_group() as group:
            for _ in range(2):
                group.start_soon(read, engine.stream(request()), got)
            await anyio.wait_all_tasks_blocked()
            group.start_soon(engine.pause, PauseMode.WAIT)
            await anyio.wait_all_tasks_blocked()
            llm.collectors[0].send(1, finish="length")
            await anyio.wait_all_tasks_blocked()
            assert (llm.asked, engine.state) == ([], EngineState.RUNNING)
            llm.collectors[1].send(1, finish="length")
    assert llm.asked == ["pause wait"]
    assert engine.stats().state is EngineState.PAUSED


async def test_abort_is_asked_again_for_a_request_that_was_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = Llm()
    engine = engine_of(llm)
    arrives = anyio.Event()
    add = llm.add_request

    async def late(*given: Any, **named: Any) -> Collector:
        await arrives.wait()
        return await add(*given, **named)

    monkeypatch.setattr(llm, "add_request", late)
    got: list[Delta] = []
    with anyio.fail_after(WATCHDOG_SECONDS):
        async with anyio.create_task_group() as group:
            group.start_soon(read, engine.stream(request()), got)
            await anyio.wait_all_tasks_blocked()
            group.start_soon(engine.pause, PauseMode.ABORT)
            while len(llm.asked) < 3:
                await checkpoint()
            arrives.set()
    assert engine.stats().state is EngineState.PAUSED
    assert not engine.vllm.requests


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_a_pause_cancelled_at_any_point_leaves_vllm_going(mode: PauseMode) -> None:
    llm = Llm()
    engine = engine_of(llm)

    async def pause() -> None:
        await engine.pause(mode)
        await engine.resume()

    def goes_on() -> None:
        if engine.state is EngineState.PAUSED:  # cancelled between pause and resume
            pytest.fail("the pause was cancelled and stayed")
        assert llm.asked[-1:] in ([], ["resume"])
        llm.asked.clear()

    assert await cancel_everywhere(pause, check=goes_on) > 1


async def test_engine_woken_from_deep_sleep_is_paused_until_new_weights() -> None:
    llm = Llm()
    engine = engine_of(llm)
    await engine.sleep(2)
    await engine.wake(["weights"])
    await engine.wake(["kv_cache"])
    asked = [
        "pause abort",
        "pause abort",
        "sleep 2",
        "wake ['weights']",
        "pause abort",
        "wake ['kv_cache']",
        "pause abort",
    ]
    assert llm.asked == asked
    assert engine.stats().state is EngineState.PAUSED
    await engine.update_weights("new")
    assert llm.asked[-1] == "resume"


# --- features that vLLM must be started for


async def test_a_gpu_that_was_not_started_to_sleep_is_not_put_to_sleep() -> None:
    llm = Llm(kind="cuda")
    engine = engine_of(llm)
    with pytest.raises(BadControl, match=r"VllmEngine\(enable_sleep_mode=True\)"):
        await engine.sleep()
    assert (llm.asked, engine.state) == ([], EngineState.RUNNING)
    await engine_of(Llm(kind="cuda", sleep_mode=True)).sleep()


async def test_a_profile_without_a_profiler_names_the_engine_argument() -> None:
    llm = Llm()
    for call in (engine_of(llm).start_profile, engine_of(llm).stop_profile):
        with pytest.raises(BadControl, match=r'profiler_config=\{"profiler": "torch", "torch_profiler_dir": FOLDER\}'):
            await call()
    assert llm.asked == []


async def test_devices_are_those_that_the_workers_report() -> None:
    assert await engine_of(Llm()).devices() == ["GPU-1", "GPU-2"]


def test_parallel_sizes_are_passed_on_as_they_are_given() -> None:
    sizes = {"tensor_parallel_size": 4, "pipeline_parallel_size": 2, "data_parallel_size": 3}
    for cpu in (True, False):
        settings = choose_settings(sizes, cpu=cpu, known=frozenset(sizes))
        assert settings.arguments == sizes
