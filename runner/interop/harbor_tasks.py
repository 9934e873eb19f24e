"""Folders of Harbor tasks: what they contain, and which requirements are not supported."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from runner.checked import is_number
from runner.errors import BadOption, BadTask
from runner.interop.variables import filled
from runner.sandbox.sandbox import SandboxOptions

__all__ = ["HarborTask", "Healthcheck", "find_task_folders", "interpreter_of", "read_task", "unsupported"]

CONFIGURATION: Final = "task.toml"
INSTRUCTION: Final = "instruction.md"
TEST_SCRIPT: Final = "tests/test.sh"
SOLUTION_SCRIPT: Final = "solution/solve.sh"

DEFAULT_SECONDS: Final = 600.0
"""Default time limit of the agent, of the verifier and of a build."""

DEFAULT_MEMORY_MB_SIZE: Final = 2048
"""Default memory of a sandbox, in MiB."""

MEGABYTES_BY_UNIT: Final = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024 * 1024}

_NETWORK: Final = frozenset({"network_mode", "allowed_hosts"})
_FIELDS: Final[Mapping[str, frozenset[str]]] = {
    "": frozenset(
        {"version", "schema_version", "source", "task", "metadata", "environment", "agent", "verifier", "solution"}
        | {"steps", "multi_step_reward_strategy", "artifacts"}
    ),
    "environment": _NETWORK
    | {"docker_image", "custom_docker_compose", "build_timeout_sec", "os", "cpus", "memory", "memory_mb", "storage"}
    | {"storage_mb", "gpus", "gpu_types", "tpu", "workdir", "env", "healthcheck", "mcp_servers", "skills_dir"}
    | {"allow_internet"},
    "agent": _NETWORK | {"timeout_sec", "user"},
    "verifier": _NETWORK | {"timeout_sec", "user", "env", "environment_mode", "environment", "collect"},
    "solution": frozenset({"env"}),
}
"""The fields of each table in Harbor 0.26, including refused fields. The key "" stands for the top level."""

_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])(?:i?B)?", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Healthcheck:
    """A command that succeeds once the sandbox is ready."""

    command: str
    retries: int
    """Number of failures after which the sandbox counts as broken."""
    interval_seconds: float
    """Time between two attempts."""
    start_seconds: float
    """Time at the beginning during which failures do not count."""
    start_interval_seconds: float
    """Time between two attempts during `start_seconds`."""
    timeout_seconds: float
    """Time limit of an attempt."""


@dataclass(frozen=True, slots=True)
class HarborTask:
    """A task folder of Harbor."""

    folder: Path
    prompt: str
    options: SandboxOptions
    agent_seconds: float
    agent_user: str | None
    """User of the agent's commands; None for the user of the image."""
    verifier_seconds: float
    verifier_user: str
    verifier_env: Mapping[str, str] = field(default_factory=dict)
    solution_env: Mapping[str, str] = field(default_factory=dict)
    healthcheck: Healthcheck | None = None
    """The check that the sandbox is ready; None if the task has no such check."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The tables `[task]` and `[metadata]`."""

    @property
    def has_solution(self) -> bool:
        return (self.folder / SOLUTION_SCRIPT).is_file()


def find_task_folders(folder: Path) -> dict[str, Path]:
    """Return the task folders by id, sorted by path: the folder itself, or all task folders below it.

    Raises:
        BadOption: there is no task folder.
    """
    if (folder / CONFIGURATION).is_file():
        return {folder.resolve().name: folder}
    found = sorted(path.parent for path in folder.rglob(CONFIGURATION)) if folder.is_dir() else []
    if not found:
        raise BadOption(
            f"harbor:{folder}: there is no {CONFIGURATION} in this folder or below it; give a folder of Harbor tasks."
        )
    return {path.relative_to(folder).as_posix(): path for path in found}


def read_task(folder: Path, *, storage: bool = False) -> HarborTask:
    """Return the task of a folder.

    Args:
        folder: the task folder.
        storage: True to limit the disk to the task's `storage_mb`.

    Raises:
        BadTask: a file is missing or invalid, an environment variable without a default is not set, or a requirement
                is not supported.
    """
    configuration = _configuration(folder)
    if names := unsupported(folder):
        raise BadTask(
            f"Harbor task {str(folder)!r} needs unsupported features: {', '.join(names)}. Leave the task out."
        )
    for name in (INSTRUCTION, TEST_SCRIPT):
        if not (folder / name).is_file():
            raise BadTask(f"Harbor task {str(folder)!r} has no {name}: add this file.")
    environment, agent = _table(configuration, "environment"), _table(configuration, "agent")
    verifier, solution = _table(configuration, "verifier"), _table(configuration, "solution")
    try:
        return HarborTask(
            folder=folder,
            prompt=(folder / INSTRUCTION).read_text(encoding="utf-8").strip(),
            options=_sandbox(folder, environment, storage=storage),
            agent_seconds=_seconds(agent, "timeout_sec"),
            agent_user=_user(agent),
            verifier_seconds=_seconds(verifier, "timeout_sec"),
            verifier_user=_user(verifier) or "0",
            verifier_env=filled(verifier.get("env") or {}, "env"),
            solution_env=filled(solution.get("env") or {}, "env"),
            healthcheck=_healthcheck(environment),
            metadata={"task": _table(configuration, "task"), "metadata": _table(configuration, "metadata")},
        )
    except (ValueError, TypeError) as error:  # BadOption is a ValueError
        raise BadTask(f"Harbor task {str(folder)!r}: {CONFIGURATION}: {error}") from None


def unsupported(folder: Path) -> list[str]:
    """Return the unsupported requirements of a task, in words; an empty list if all are supported.

    Raises:
        BadTask: `task.toml` cannot be read, or a field that should be a table has another value.
    """
    configuration = _configuration(folder)
    return list(_unsupported(folder, configuration, _table(configuration, "environment")))


def _unsupported(folder: Path, configuration: Mapping[str, Any], environment: Mapping[str, Any]) -> Iterator[str]:
    files = ("docker-compose.yaml", "docker-compose.yml")
    compose = next((name for name in files if (folder / "environment" / name).exists()), "custom_docker_compose")
    network = "no-network" if _is_offline(environment) else "public"
    own_network = [name for name in ("agent", "verifier") if _network(configuration, name) not in (None, network)]
    verifier = _table(configuration, "verifier")
    needed = {
        f"compose ({compose})": compose in files or environment.get(compose),
        "a network allow-list (network_mode)": environment.get("network_mode") == "allowlist"
        or environment.get("allowed_hosts"),
        **{f"another network for the {name} ({name}.network_mode)": True for name in own_network},
        "GPUs (gpus)": environment.get("gpus") or environment.get("gpu_types"),
        "TPUs (tpu)": environment.get("tpu"),
        f"{environment.get('os')} (os)": str(environment.get("os", "linux")).lower() != "linux",
        "several steps (steps)": configuration.get("steps") or (folder / "steps").is_dir(),
        "MCP servers (mcp_servers)": environment.get("mcp_servers"),
        "skills (skills_dir)": environment.get("skills_dir"),
        "a separate verifier (environment_mode)": verifier.get("environment_mode") == "separate"
        or verifier.get("environment"),
        "commands before the verifier (collect)": verifier.get("collect"),
        "an earlier conversation (trajectory.json)": (folder / "trajectory.json").exists(),
    }
    yield from (name for name, is_needed in needed.items() if is_needed)
    for name, known in _FIELDS.items():
        given = _table(configuration, name) if name else configuration
        yield from (f"an unknown field ({name + '.' if name else ''}{each})" for each in sorted(given.keys() - known))


def _network(configuration: Mapping[str, Any], name: str) -> Any:
    return _table(configuration, name).get("network_mode")


def _configuration(folder: Path) -> dict[str, Any]:
    try:
        return tomllib.loads((folder / CONFIGURATION).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadTask(f"Harbor task {str(folder)!r}: {CONFIGURATION} cannot be read ({error}): correct it.") from None


def _table(configuration: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = configuration.get(name) or {}
    if not isinstance(found, dict):
        raise BadTask(f"{CONFIGURATION}: {name} is {found!r:.60}; it must be a table, [{name}].")
    return found


def _sandbox(folder: Path, environment: Mapping[str, Any], *, storage: bool) -> SandboxOptions:
    image: str | Path | None = environment.get("docker_image")
    if not image:
        image = folder / "environment"
        if not (image / "Dockerfile").is_file():
            raise ValueError("neither docker_image in [environment] nor environment/Dockerfile exists: add one")
    memory = environment.get("memory_mb") or _megabytes(environment, "memory")
    disk = environment.get("storage_mb") or _megabytes(environment, "storage")
    return SandboxOptions(
        image=image,
        memory_mb=memory or DEFAULT_MEMORY_MB_SIZE,
        cpus=environment.get("cpus") or 1,
        processes=1024,
        disk_mb=disk if storage else None,
        network="none" if _is_offline(environment) else "internet",
        env=filled(environment.get("env") or {}, "env"),
        workdir=environment.get("workdir"),
        build_seconds=_seconds(environment, "build_timeout_sec"),
    )


def _is_offline(environment: Mapping[str, Any]) -> bool:
    mode = environment.get("network_mode")
    return mode == "no-network" or (mode is None and environment.get("allow_internet") is False)


def _megabytes(environment: Mapping[str, Any], name: str) -> int | None:
    size = environment.get(name)
    if size is None:
        return None
    match = _SIZE.fullmatch(str(size))
    if match is None:
        raise ValueError(f"{name} = {size!r}: give a size such as '2G'")
    return int(float(match[1]) * MEGABYTES_BY_UNIT[match[2].upper()])


def _seconds(table: Mapping[str, Any], name: str) -> float:
    seconds = table.get(name, DEFAULT_SECONDS)
    if not is_number(seconds) or not 0 < seconds < float("inf"):
        raise ValueError(f"{name} = {seconds!r}: give a number above 0")
    return float(seconds)


def _user(table: Mapping[str, Any]) -> str | None:
    user = table.get("user")
    return None if user in (None, "") else str(user)


def _healthcheck(environment: Mapping[str, Any]) -> Healthcheck | None:
    given = environment.get("healthcheck")
    if not given:
        return None
    return Healthcheck(
        command=str(given["command"]) if "command" in given else "true",
        retries=int(given.get("retries", 3)),
        interval_seconds=float(given.get("interval_sec", 5)),
        start_seconds=float(given.get("start_period_sec", 0)),
        start_interval_seconds=float(given.get("start_interval_sec", 5)),
        timeout_seconds=float(given.get("timeout_sec", 30)),
    )


def interpreter_of(script: Path) -> Sequence[str]:
    """Return the command that runs a script: its first line after `#!`, or bash."""
    with script.open("rb") as file:
        line = file.readline().decode("utf-8", "replace")
    return line[2:].split() if line.startswith("#!") and line[2:].split() else ["bash"]
