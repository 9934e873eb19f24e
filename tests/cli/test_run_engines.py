"""`deltarunner run --workers`: refused options, and the engines that accepted options lead to."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from runner import BadModel, BadOption, ChatEngine, ScriptedEngine, VllmEngine
from runner.cli.app import app
from runner.cli.run import real_engine, run_command
from runner.cli.settings import RunSettings
from runner.cluster.engines import FleetEngine
from tests.cluster.ray_cluster import require_ray

AUTHOR = '''
from runner import Environment, Task, reward

class Greeting(Environment):
    """Says hello."""
    def tasks(self):
        return [Task(id=f"t-{n}", prompt="hello") for n in range(6)]
    @reward
    def polite(self):
        return self.episode.text == "hi"
'''


def play(engine: Any = None, **options: Any) -> int:
    return run_command(RunSettings(**options), lambda settings: engine or ScriptedEngine("hi"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cluster": "auto"}, "--cluster auto: give --workers, the number"),
        ({"worker_gpus": 0.0}, "--worker-gpus 0: give --workers, the number"),
        ({"stall_seconds": 60.0}, "--stall-seconds 60: give --workers, the number"),
        ({"workers": "0"}, "--workers 0: give a number"),
        ({"workers": "many"}, "--workers many: give a number"),
        ({"workers": "8-4"}, "the minimum to start with and the maximum"),
        ({"workers": "4-"}, "--workers 4-: give a number"),
        ({"workers": "2", "server": "http://127.0.0.1:1"}, "--workers 2 and --server"),
        ({"workers": "2", "api_model": "gpt"}, "--workers 2 and --api-model"),
        ({"workers": "2", "debug": True}, "--workers 2 and --debug"),
        ({"workers": "2", "listen": "127.0.0.1:8000"}, "--listen 127.0.0.1:8000: each worker serves its own"),
    ],
)
def test_options_that_conflict_with_workers_are_refused(folder: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadOption, match=re.escape(message)):
        play(environment="mine.py:Greeting", **options)
    assert not Path("runs").exists()


def test_workers_without_ray_name_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BadOption, match=re.escape("--workers needs Ray: pip install 'deltarunner[ray]'")):
        play(environment="mine.py:Greeting", workers="2")


def test_a_ray_that_does_not_load_is_named_before_anything_is_played(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "ray").mkdir()
    (folder / "ray" / "__init__.py").write_text("raise ImportError('libray.so: no such file')")
    monkeypatch.syspath_prepend(str(folder))
    for module in [name for name in sys.modules if name.partition(".")[0] == "ray"]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(BadOption, match=r"Ray is installed here and does not load \(libray.so: no such file\)"):
        play(environment="mine.py:Greeting", workers="2")


def test_ray_client_is_refused_from_the_environment_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_ray()
    monkeypatch.setenv("RAY_ADDRESS", "ray://10.0.0.1:10001")
    with pytest.raises(BadOption, match=re.escape("RAY_ADDRESS=ray://10.0.0.1:10001: Ray Client")):
        play(environment="mine.py:Greeting", workers="2")


def test_address_without_a_cluster_is_refused_with_an_example(folder: Path) -> None:
    require_ray()
    with pytest.raises(BadOption, match=r"no cluster of Ray at 'nowhere'.*'auto' on a machine of a running cluster"):
        play(environment="mine.py:Greeting", workers="2", cluster="nowhere")


def test_head_on_loopback_alone_is_refused_with_the_reason(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_ray()

    def init(**_: Any) -> None:
        raise ConnectionError("10.0.0.1:6511 does not answer")  # the address at which Ray searches

    monkeypatch.setattr("ray.init", init)
    # Without this, Ray would wait for tens of seconds for a silent server.
    monkeypatch.setattr("runner.cluster.ray.connection._speaks_http2", lambda peer: True)
    monkeypatch.setattr("runner.cluster.ray.connection.admit", lambda address: None)
    with socket.create_server(("127.0.0.1", 0)) as somebody:
        address = f"127.0.0.1:{somebody.getsockname()[1]}"
        with pytest.raises(BadOption, match=rf"at '{address}': 10.0.0.1:6511 .* only on loopback cannot be reached"):
            play(environment="mine.py:Greeting", workers="2", cluster=address)


def test_an_engine_of_messages_has_no_workers(folder: Path) -> None:
    require_ray()
    with pytest.raises(BadOption, match="ChatEngine does not return token ids"):
        play(ChatEngine("gpt", api_key="key"), environment="mine.py:Greeting", workers="2")


def test_the_help_names_workers_and_cluster() -> None:
    help_text = CliRunner().invoke(app, ["run", "--help"], env={"COLUMNS": "200", "TERM": "dumb"}).output
    assert "--workers" in help_text
    assert "--cluster" in help_text


def test_worker_resources_and_stall_time_reach_the_fleet(folder: Path) -> None:
    require_ray()
    from runner.cli.run_engines import engine_with_workers

    given = RunSettings(workers="2", worker_gpus=0.5, worker_cpus=3.0, stall_seconds=60.0)
    engine: Any = engine_with_workers(given, lambda _: ScriptedEngine("hi"))
    assert (engine.launcher._given_gpus, engine.launcher._cpus, engine._stall_seconds) == (0.5, 3.0, 60.0)


@pytest.mark.parametrize("cluster", ["auto", None])
def test_vllm_is_not_demanded_of_a_machine_that_only_drives(
    folder: Path, monkeypatch: pytest.MonkeyPatch, cluster: str | None
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setitem(sys.modules, "vllm", None)
    settings = RunSettings(workers="2", cluster=cluster)
    if cluster is None:
        with pytest.raises(BadModel, match="vLLM, which runs the models, is not installed"):
            real_engine(settings)
    else:
        assert isinstance(real_engine(settings), VllmEngine)


def test_workers_option_sets_the_range_of_the_fleet(folder: Path) -> None:
    require_ray()
    from runner.cli.run_engines import engine_with_workers

    ranges = []
    for workers in ("4", "8-64"):
        engine = engine_with_workers(RunSettings(workers=workers), lambda _: ScriptedEngine("hi"))
        assert isinstance(engine, FleetEngine)
        ranges.append((engine.least, engine.most))
    assert ranges == [(4, 4), (8, 64)]
