"""The process that forks the engines of tests."""

from __future__ import annotations

import time

from tests.engine_starts import ForkingContext, end_forking


def test_end_of_forking_does_not_wait_for_a_running_engine() -> None:
    engine = ForkingContext().Process(target=time.sleep, args=(600,))
    engine.start()
    end_forking()
    assert engine.is_alive()
    engine.terminate()
    engine.join()
    end_forking()
