"""`deltarunner run --server`: a server samples, and everything else is as without it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from anyio.from_thread import start_blocking_portal
from typer.testing import CliRunner, Result

from runner import RunFile, ToolCall
from runner.cli.app import app
from runner.engines.scripted.script import ModelCall
from runner.errors import BadOption
from runner.testing import call
from tests.engines.remote.loopback import Loopback
from tests.engines.remote.remote_requests import serve


def adds(asked: ModelCall) -> ToolCall:
    return call("answer", value=len(re.findall("tool", asked.prompt)))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Loopback]:
    """A server on an event loop of its own, which accepts requests with the right key."""
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(serve(tmp_path, adds, key="a-key-of-ours")) as loopback,
    ):
        yield loopback


def run(server: Loopback, folder: Path, *options: str, key: str | None = "a-key-of-ours") -> Result:
    command = ["run", "calculator", "--model", str(folder / "model"), "--server", server.url, "-n", "3", *options]
    environment: dict[str, Any] = {"DELTARUNNER_SERVER_KEY": key}
    return CliRunner().invoke(app, command, env=environment)


def last_line(result: Result) -> dict[str, Any]:
    said: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return said


def test_run_on_a_server_is_stored_and_resumes_its_file(
    server: Loopback, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.db"
    result = run(server, tmp_path, "--file", str(file), "--engine-option", "places=2", "--json")
    assert result.exit_code == 0, result.output
    assert last_line(result)["summary"]["episodes"] == 3
    assert f"at {server.url}" in capfd.readouterr().err
    with RunFile(file) as run_file:
        assert (run_file.header.engine["kind"], run_file.header.engine["places"]) == ("remote", 2)
        assert "a-key-of-ours" not in json.dumps(dict(run_file.header.engine))
    again = run(server, tmp_path, "--file", str(file), "-n", "5", "--json")
    assert again.exit_code == 0, again.output
    assert last_line(again)["stored_before"] == 3
    checked = CliRunner().invoke(app, ["verify", str(file)])
    assert checked.exit_code == 0, checked.output


def test_a_wrong_key_is_refused_with_the_fix_and_without_the_key(server: Loopback, tmp_path: Path) -> None:
    result = run(server, tmp_path, "--file", str(tmp_path / "run.db"), key="a wrong one")
    assert isinstance(result.exception, BadOption | SystemExit)
    assert "a wrong one" not in result.output + str(result.exception)
    assert "--server-key" in result.output + str(result.exception)


def test_an_argument_of_vllms_engine_is_refused_where_a_server_has_it(server: Loopback, tmp_path: Path) -> None:
    result = run(server, tmp_path, "--engine-option", "max_num_seqs=4")
    assert "with --server the options are dialect, name, places" in result.output + str(result.exception)
    assert server.bodies == []
