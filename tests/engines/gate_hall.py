"""Requests at an admission gate, for tests that admit and release them one by one."""

from dataclasses import dataclass, field

import anyio
import anyio.abc

from runner.engines.base import Session
from runner.engines.gate import AdmissionGate


@dataclass
class Hall:
    """Requests at a gate. Each is a task that stays inside until the test releases it."""

    gate: AdmissionGate
    tasks: anyio.abc.TaskGroup
    entered: list[int] = field(default_factory=list)
    inside: list[int] = field(default_factory=list)
    scopes: dict[int, anyio.CancelScope] = field(default_factory=dict)
    releases: dict[int, anyio.Event] = field(default_factory=dict)

    async def arrive(self, number: int, session: Session, tokens: int = 1) -> None:
        self.tasks.start_soon(self._visit, number, session, tokens)
        await anyio.wait_all_tasks_blocked()

    async def _visit(self, number: int, session: Session, tokens: int) -> None:
        self.releases[number] = anyio.Event()
        with anyio.CancelScope() as self.scopes[number]:
            await self.gate.enter(session, tokens)
            self.entered.append(number)
            self.inside.append(number)
            assert len(self.inside) <= self.gate.places
            try:
                await self.releases[number].wait()
            finally:
                self.inside.remove(number)
                self.gate.leave(session, tokens)

    async def release(self, number: int) -> None:
        self.releases[number].set()
        await anyio.wait_all_tasks_blocked()

    async def cancel(self, number: int) -> None:
        self.scopes[number].cancel()
        await anyio.wait_all_tasks_blocked()
