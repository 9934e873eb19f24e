"""Fixtures of the tests of engines."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.polyglot import polyglot_model
from tests.engines.remote.model_server import ModelServer
from tests.engines.remote.model_server import model_server as start_server


@pytest.fixture(scope="session")
def polyglot_folder(small_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose vocabulary has the control tokens of every family."""
    return polyglot_model(tmp_path_factory.mktemp("polyglot"), small_model_folder)


@pytest.fixture(scope="session")
def model_server(small_model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    """A vLLM server with the small model, which returns log-probabilities as our own engine does."""
    log = tmp_path_factory.mktemp("server") / "server.log"
    with start_server(small_model_folder, log, "--logprobs-mode", "processed_logprobs") as server:
        yield server
