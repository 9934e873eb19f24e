"""Log records of a fleet: workers that start, play, are dismissed, are lost and are replaced."""

from __future__ import annotations

import logging
import re

import pytest

from runner.testing import VirtualClock
from tests.cluster.playing import fleet
from tests.playing import until


def test_loss_dismissal_and_successors_of_a_worker_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="deltarunner.cluster")

    async def run() -> None:
        async with fleet(1) as (engine, launcher), engine:
            driver = engine.driver
            launcher.workers[0].kill()
            await until(lambda: 1 in launcher.workers and len(driver.handles) == 1)
            driver.handles[0].dismiss("it hangs")
            await until(lambda: 2 in launcher.workers and len(driver.handles) == 1)

    VirtualClock().run(run)
    records = [record for record in caplog.records if record.name == "deltarunner.cluster"]
    plain = [re.sub(r" on [^ :]+|, with weights .*", "", record.getMessage()) for record in records]
    assert plain == [
        "worker 0 starts; lost predecessors: 0",
        "worker 0 plays",
        "worker 0 is lost: its process died",
        "worker 1 starts; lost predecessors: 1",
        "worker 1 plays",
        "worker 1 is dismissed: it hangs",
        "worker 1 is lost: it hangs",
        "worker 2 starts; lost predecessors: 2",
        "worker 2 plays",
    ]
    assert [record.levelname for record in records if record.levelno > logging.INFO] == ["WARNING"] * 3
