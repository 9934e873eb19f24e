"""Patched wait of an engine's processes: they sleep only on a CPU, and miss no message."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any

import pytest

from runner.engines.vllm.worker import parent_watch, spin_wait_patch

pytest.importorskip("vllm")

from vllm.distributed.device_communicators import shm_broadcast  # the import fails if vLLM has moved it

WATCHDOG_SECONDS = 600.0


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        shm_broadcast.SpinCondition, "wait", shm_broadcast.SpinCondition.wait
    )  # restored after the test
    spin_wait_patch.patch_spin_wait()


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows with each immediate poll for a message."""
    times: list[int] = []
    monkeypatch.setattr(shm_broadcast, "sched_yield", lambda: times.append(len(times)))
    return times


@pytest.fixture
def queues() -> Iterator[tuple[Any, Any]]:
    """Both ends of the queue between a core and its worker."""
    writer = shm_broadcast.MessageQueue(n_reader=1, n_local_reader=1)
    reader = shm_broadcast.MessageQueue.create_from_handle(writer.export_handle(), rank=0)
    met = threading.Thread(target=writer.wait_until_ready)
    met.start()
    reader.wait_until_ready()
    met.join()
    yield writer, reader
    reader.shutdown()


def test_unpatched_reader_polls_after_a_message(queues: tuple[Any, Any], asked: list[int]) -> None:
    condition = queues[1]._spin_condition
    condition.last_read = math.inf  # a message that arrived just now, on a machine of any speed
    condition.wait(timeout_ms=0)
    assert asked == [0], "vLLM has fixed it: remove the patch"


@pytest.mark.usefixtures("patched")
def test_waiting_reader_sleeps_and_gets_every_message(queues: tuple[Any, Any], asked: list[int]) -> None:
    writer, reader = queues
    got: list[int] = []

    def read() -> None:
        for _ in range(50):
            got.append(reader.dequeue(timeout=WATCHDOG_SECONDS))
            read_one.set()

    read_one = threading.Event()
    thread = threading.Thread(target=read)
    thread.start()
    for number in range(50):
        writer.enqueue(number)
        if number % 2:  # some messages one by one, and some while others are unread
            assert read_one.wait(WATCHDOG_SECONDS)
            read_one.clear()
    thread.join(WATCHDOG_SECONDS)
    assert not thread.is_alive()
    assert (got, asked) == (list(range(50)), [])


@pytest.mark.usefixtures("patched")
def test_a_message_whose_note_was_lost_is_found(queues: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    writer, reader = queues
    monkeypatch.setattr(writer._spin_condition, "notify", lambda: None)
    sent = threading.Timer(0.05, writer.enqueue, ["a message"])
    sent.start()
    assert reader.dequeue(timeout=WATCHDOG_SECONDS) == "a message"


@pytest.mark.usefixtures("patched")
def test_second_spin_wait_patch_changes_nothing() -> None:
    once = shm_broadcast.SpinCondition.wait
    spin_wait_patch.patch_spin_wait()
    assert shm_broadcast.SpinCondition.wait is once


@pytest.mark.parametrize("cpu", [True, False], ids=["CPU", "GPU"])
@pytest.mark.parametrize("parent", [None, "ours"], ids=["not ours", "ours"])
def test_only_our_engines_on_a_cpu_are_patched(cpu: bool, parent: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    patched: list[bool] = []
    monkeypatch.setattr(spin_wait_patch, "patch_spin_wait", lambda: patched.append(True))
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda _: cpu)
    monkeypatch.delenv(parent_watch.PARENT, raising=False)
    if parent is not None:
        monkeypatch.setenv(parent_watch.PARENT, f"{os.getppid()}:1")
    spin_wait_patch.patch_waiting_processes()
    assert bool(patched) == (cpu and parent is not None)


def test_entry_point_of_the_patch_is_installed() -> None:
    (entry_point,) = entry_points(group="vllm.general_plugins", name=spin_wait_patch.ENTRY_POINT)
    assert entry_point.load() is spin_wait_patch.patch_waiting_processes
