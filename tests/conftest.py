"""Fixtures that tests share."""

from pathlib import Path

import pytest

from runner.models import demo_model


@pytest.fixture(scope="session")
def demo_model_folder() -> Path:
    """The demo model's folder; converted at its first use."""
    return demo_model(say=print)
