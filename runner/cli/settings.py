"""The options of `deltarunner run` and `deltarunner serve`, with their types and help texts."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from runner.errors import BadOption
from runner.logs import LEVELS
from runner.sampling_fields import SAMPLING_FIELDS, SamplingField, sampling_names

__all__ = [
    "ENVIRONMENT",
    "JSON",
    "PRICES",
    "SERVED",
    "SETTINGS",
    "TEMPLATE_OPTION",
    "TOOL_FORMAT",
    "RunSettings",
    "ServeSettings",
    "options_from",
]

S = TypeVar("S")

_NUMBER = re.compile(r"\d+(\.\d+)?")

DATASET_USAGE = "deltarunner run dataset --tasks FILE --prompt '{question}' --answer '{answer}' --score number"
"""An example command, for error messages."""

PROGRAM = "runner.environment.program:Program"
"""The environment that runs agent programs."""

SANDBOXED_PROGRAM = "runner.interop.sandboxed_program:SandboxedProgram"
"""The environment that runs agent programs in sandboxes."""

DATASET = "dataset"
"""The name of the environment that plays a data set."""

HARBOR = "harbor"
"""The environment that plays tasks of Harbor, with or without an agent program."""

DATASET_OPTIONS = ("prompt", "answer", "score", "id", "system", "info", "where", "shuffle", "skip", "take", "cache")
"""The options of the environments `dataset` and `mcp`; each is an argument of their constructors."""

ENVIRONMENT = typer.Argument(
    metavar="ENV",
    help="A bundled environment (`deltarunner list`), path.py:Class, or module:Class.",
    show_default=False,
)
SETTINGS = typer.Option("--set", metavar="NAME=VALUE", help="An argument of the environment's constructor.")
TEMPLATE_OPTION = typer.Option(
    "--template-option", metavar="NAME=VALUE", help="A variable of the chat template (enable_thinking=false)."
)
TOOL_FORMAT = typer.Option(
    "--tool-format",
    metavar="vllm:NAME",
    help="Parse tool calls with a parser of vLLM; the default parser is learnt from the template and rarely worse.",
)
PRICES = typer.Option(metavar="FILE.toml", help="Prices of a million tokens of each model: show the cost.")
LOG_LEVEL = typer.Option(
    metavar="|".join(LEVELS), help="Write deltarunner's log records of at least this level to the log."
)
JSON = typer.Option("--json", help="Print one line of JSON on stdout, everything else on stderr.")


SERVED = (
    "environment",
    "settings",
    "protocol",
    "bind",
    "model",
    "template",
    "template_options",
    "tool_format",
    "engine_options",
    "server",
    "server_key",
    "api_model",
    "api_url",
    "api_key",
    "seed",
    *sampling_names(served=True),
    "limits",
    "history",
    "listen",
    "train",
    "system_as_user",
    "overflow",
    "sent_history",
    "concurrency",
    "file",
    "verbose",
    "log_level",
    "json",
)
"""Names of the options of `deltarunner serve`: fields of `ServeSettings`, and sampling fields."""


SAMPLING = "sampling options"
"""Annotation of the field `sampling`. In place of this field, each sampling field with a help text is an option."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """The options of `deltarunner run` as given on the command line; only their types are checked.

    None stands for an option that was not given. The defaults are in `RunOptions`, which is not imported here: its
    import is slow, and `--help` would wait for it.
    """

    environment: Annotated[str | None, ENVIRONMENT] = None
    others: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ENV[:WEIGHT]]...", help="Further environments of the same run.", show_default=False),
    ] = None
    agent: Annotated[
        str | None, typer.Option(metavar="COMMAND", help="Play an agent program instead of ENV: 'claude -p {prompt}'.")
    ] = None
    check: Annotated[
        str | None, typer.Option(metavar="COMMAND", help="With --agent: command whose exit code 0 means solved.")
    ] = None
    copy: Annotated[Path | None, typer.Option(help="With --agent: folder to copy for each episode.")] = None
    wrap: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND", help="With --agent: a command in front of it, such as a sandbox; {folder}, {home}."
        ),
    ] = None
    sandbox: Annotated[
        str | None,
        typer.Option(
            metavar="IMAGE",
            help="With --agent: run it in a container without network; an image, or a folder with a Dockerfile.",
        ),
    ] = None
    train: Annotated[
        bool | None,
        typer.Option(
            "--train/--no-train",
            help="Agent programs: train all threads, or none; default: threads with tools.",
        ),
    ] = None
    system_as_user: Annotated[
        bool | None,
        typer.Option(
            "--system-as-user",
            help="Agent programs: turn later system messages into user messages, for templates without them.",
        ),
    ] = None
    overflow: Annotated[
        str | None,
        typer.Option(
            metavar="tell|end",
            help="Agent programs: if a history does not fit, return an error to the client (tell), or end the episode.",
        ),
    ] = None
    sent_history: Annotated[
        str | None,
        typer.Option(
            metavar="append|client",
            help="Agent programs: continue the sampled history (append, default) or the one that the client sends.",
        ),
    ] = None
    episodes: Annotated[
        int | None, typer.Option("--episodes", "-n", min=1, help="Episodes to play; default: all tasks.")
    ] = None
    model: Annotated[str, typer.Option(help="smollm2-135m, a folder, or a Hugging Face id.")] = "smollm2-135m"
    template: Annotated[
        str | None, typer.Option(help="Chat template: pythonic, hermes, or a file; default: the model's.")
    ] = None
    template_options: Annotated[list[str] | None, TEMPLATE_OPTION] = None
    tool_format: Annotated[str | None, TOOL_FORMAT] = None
    engine_options: Annotated[
        list[str] | None,
        typer.Option(
            "--engine-option",
            metavar="NAME=VALUE",
            help="An argument of the engine: vLLM's (max_num_seqs=64), or of --server or --api-model (places=64).",
        ),
    ] = None
    server: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Sample on a server of vLLM or SGLang instead of in this process."),
    ] = None
    server_key: Annotated[
        str | None,
        typer.Option(envvar="DELTARUNNER_SERVER_KEY", help="API key of the server.", show_envvar=True),
    ] = None
    api_model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Use a model of a chat API (OpenAI's form): for evaluation, not for training."
        ),
    ] = None
    api_url: Annotated[
        str | None, typer.Option(metavar="URL", help="URL of the chat API, with /v1; default: OpenAI's.")
    ] = None
    api_key: Annotated[
        str | None,
        typer.Option(envvar="DELTARUNNER_API_KEY", help="Key of the chat API.", show_envvar=True),
    ] = None
    engines: Annotated[
        list[str] | None,
        typer.Option(
            "--engine",
            metavar="AGENT=ENGINE",
            help="Another engine for an agent, such as judge or user: api:MODEL[@URL], or MODEL@URL of a server.",
        ),
    ] = None
    workers: Annotated[
        str | None,
        typer.Option(
            metavar="N", help="Number of engines, each playing its own episodes: 4, or 8-64 as machines join."
        ),
    ] = None
    cluster: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Ray cluster for --workers (auto); default: RAY_ADDRESS, or a new one."),
    ] = None
    worker_gpus: Annotated[
        float | None,
        typer.Option(metavar="N", min=0, help="GPUs that Ray reserves for each worker; default: as the engine needs."),
    ] = None
    worker_cpus: Annotated[
        float | None, typer.Option(metavar="N", min=0, help="CPU cores that Ray reserves for each worker; default 1.")
    ] = None
    stall_seconds: Annotated[
        float | None,
        typer.Option(metavar="N", min=0, help="Seconds with too few workers after which the run ends; default 600."),
    ] = None
    settings: Annotated[list[str] | None, SETTINGS] = None
    tasks: Annotated[
        Path | None,
        typer.Option(
            help="JSONL file of tasks; default: the environment's. For `dataset` also CSV, Parquet, hf:NAME[SPLIT]."
        ),
    ] = None
    prompt: Annotated[
        str | None, typer.Option(help="dataset: a field, or a text such as 'Question: {question}'; default prompt.")
    ] = None
    answer: Annotated[str | None, typer.Option(help="dataset: the reference answer: a field or a text.")] = None
    score: Annotated[
        str | None,
        typer.Option(
            help="dataset: exact, contains, number, choice, math, json, regex:PATTERN, judge:RUBRIC, judge:@FILE or "
            "module:function."
        ),
    ] = None
    id: Annotated[str | None, typer.Option(help="dataset: a unique field; default a hash of prompt and answer.")] = None
    system: Annotated[str | None, typer.Option(help="dataset: the system message.")] = None
    info: Annotated[
        list[str] | None, typer.Option(metavar="FIELD", help="dataset: a further field for the scorer.")
    ] = None
    where: Annotated[
        list[str] | None, typer.Option(metavar="CONDITION", help="dataset: only rows with: 'level>=4', 'type=algebra'.")
    ] = None
    shuffle: Annotated[
        int | None, typer.Option(metavar="SEED", min=0, help="dataset: shuffle the rows with this seed.")
    ] = None
    skip: Annotated[int | None, typer.Option(min=0, help="dataset: leave out the first N rows.")] = None
    take: Annotated[int | None, typer.Option(min=0, help="dataset: keep N rows.")] = None
    cache: Annotated[
        str | None, typer.Option(metavar="FILE", help="dataset: keep the scores of a judge in this file.")
    ] = None
    group_size: Annotated[
        int | None, typer.Option("--group-size", "--repeat", min=1, help="Episodes of each task; default 1.")
    ] = None
    fail_under: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=NUMBER", help="Exit code 4 if reward, a metric, pass@k or pass^k is lower."),
    ] = None
    seed: Annotated[int | None, typer.Option(help="Seed of all random numbers; default 0.")] = None
    sampling: Annotated[dict[str, Any] | None, SAMPLING] = None
    limits: Annotated[
        list[str] | None,
        typer.Option("--limit", metavar="NAME=VALUE", help="A limit of an episode (turns=8, seconds=60)."),
    ] = None
    history: Annotated[
        str | None, typer.Option(help="If the chat template rewrites earlier turns: append (default), fork or refuse.")
    ] = None
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Address of the endpoint for agent programs.")
    ] = None
    concurrency: Annotated[int | None, typer.Option(min=1, help="Maximum number of episodes in flight.")] = None
    file: Annotated[Path | None, typer.Option(help="The run file; default runs/ENV-NNN.db.")] = None
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Play the failed episodes of the file again.")
    ] = False
    task: Annotated[str | None, typer.Option(help="Play only the task with this id; stored only with --file.")] = None
    index: Annotated[int | None, typer.Option(min=0, help="Play only this episode of each group.")] = None
    show: Annotated[int, typer.Option(min=0, help="Number of transcripts to show at the end.")] = 0
    verbose: Annotated[bool, typer.Option("--verbose", help="Longer summary: how prompts were built, and times.")] = (
        False
    )
    log_level: Annotated[str | None, LOG_LEVEL] = None
    debug: Annotated[bool, typer.Option("--debug", help="No time limits, one episode at a time, for breakpoint().")] = (
        False
    )
    json: Annotated[bool, JSON] = False

    @property
    def keys(self) -> list[str]:
        """The API keys, which no log and no output may contain."""
        return [key for key in (self.api_key, self.server_key) if key]

    @property
    def model_name(self) -> str:
        return self.model if self.api_model is None else self.api_model

    @property
    def environment_name(self) -> str:
        assert self.environment is not None, "call with_program() first"
        return self.environment if not self.others else "+".join(name for name, _, _ in self.mixed())

    def mixed(self) -> list[tuple[str, str, float]]:
        """The short name, the full name and the weight of each environment of a mixture.

        Raises:
            BadOption: two environments have the same short name.
        """
        from runner.environment.loading import short_name

        found: dict[str, tuple[str, str, float]] = {}
        for text in (self.environment or "", *(self.others or ())):
            before, colon, weight = text.rpartition(":")
            is_weighted = bool(colon) and _NUMBER.fullmatch(weight) is not None
            full = before if is_weighted else text
            name = short_name(full)
            if name in found:
                given = " ".join((self.environment or "", *(self.others or ())))
                raise BadOption(f"{given}: {name!r} is named twice: name it once.")
            found[name] = (name, full, float(weight) if is_weighted else 1.0)
        return list(found.values())

    def serving(self) -> dict[str, Any]:
        """Keyword arguments of `OpenEpisodes` and `Program`; None stands for the default."""
        return {
            "train": self.train,
            "system_as_user": self.system_as_user,
            "overflow": self.overflow,
            "sent_history": self.sent_history,
        }

    def with_program(self) -> RunSettings:
        """Return settings with an environment, whose arguments include the options of `dataset` and of `--agent`.

        Raises:
            BadOption: the environment or a needed option is missing, or an option does not belong to the environment.
        """
        return self._with_dataset()._with_program()

    def _with_dataset(self) -> RunSettings:
        given = {name: getattr(self, name) for name in DATASET_OPTIONS if getattr(self, name) is not None}
        if self.environment not in (DATASET, "mcp") or self.others:
            if given and self.others:
                name = next(iter(given))
                raise BadOption(f"--{name} with several environments: name one, as in --set dataset.{name}=VALUE.")
            if given:
                raise BadOption(f"--{next(iter(given))} is an option of the environment `dataset`: {DATASET_USAGE}")
            return self
        own = [f"{name}={json.dumps(value) if isinstance(value, list) else value}" for name, value in given.items()]
        if self.tasks is not None:
            own.append(f"tasks={self.tasks}")
        elif not any(each.startswith("tasks=") for each in self.settings or ()):
            raise BadOption(f"{self.environment}: give the file with --tasks: {DATASET_USAGE}")
        return dataclasses.replace(self, tasks=None, settings=[*own, *(self.settings or [])])

    def _with_harbor_agent(self, given: Mapping[str, Any]) -> RunSettings:
        own = [name for name in ("check", "copy", "wrap", "sandbox") if name in given]
        if own:
            raise BadOption(
                f"--{own[0]} and {self.environment}: a Harbor task has its own sandbox and check; leave --{own[0]} out."
            )
        settings = [f"{name}={value}" for name, value in given.items()]
        return dataclasses.replace(self, settings=[*settings, *(self.settings or [])])

    def _with_program(self) -> RunSettings:
        # The path is absolute, since workers have another working directory.
        copy = self.copy.absolute() if self.copy is not None and self.workers is not None else self.copy
        of_program = {"agent": self.agent, "check": self.check, "copy": copy, "wrap": self.wrap, **self.serving()}
        if self.sandbox is not None:
            of_program["sandbox"] = self.sandbox
        given = {
            name: str(value).lower() if isinstance(value, bool) else value
            for name, value in of_program.items()
            if value is not None
        }
        if self.agent is None and given:
            name = next(iter(given)).replace("_", "-")
            raise BadOption(f"--{name} needs --agent: give the program's command.")
        if self.agent is None and self.environment is None:
            raise BadOption("give an environment (`deltarunner list`), or --agent 'COMMAND {prompt}'.")
        if self.agent is None:
            if self.others and self.tasks is not None:
                raise BadOption(
                    "--tasks: each of several environments has its own tasks: give the file to one, such as "
                    "--set dataset.tasks=FILE."
                )
            return self
        if self.environment is not None and self.environment.partition(":")[0] == HARBOR and not self.others:
            return self._with_harbor_agent(given)
        if self.environment is not None:
            raise BadOption(f"{self.environment} and --agent: give one of them.")
        if self.tasks is None:
            raise BadOption(
                '--agent: give the prompts with --tasks FILE.jsonl, of lines such as {"id": ..., "prompt": ...}.'
            )
        own = [f"{name}={value}" for name, value in given.items()]
        program = PROGRAM if self.sandbox is None else SANDBOXED_PROGRAM
        return dataclasses.replace(self, environment=program, settings=[*own, *(self.settings or [])])


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings(RunSettings):
    """The options of `deltarunner serve` as given on the command line. `SERVED` has their names."""

    protocol: Annotated[
        str | None,
        typer.Option("--as", metavar="verifiers", help="Play ENV for a trainer that speaks this protocol (prime-rl)."),
    ] = None
    bind: Annotated[
        str | None,
        typer.Option(metavar="tcp://HOST:PORT", help="With --as: the address; default tcp://127.0.0.1:5000."),
    ] = None


def options_from(
    settings: type[S], only: Collection[str] | None = None
) -> Callable[[Callable[[S], int]], Callable[..., int]]:
    """Return a decorator for a function that takes a settings object. Each field becomes an option of the command.

    Args:
        settings: a dataclass with fields annotated as parameters of Typer.
        only: names of the fields that become options; None for all fields.
    """
    parameters = [each for each in _parameters(settings) if only is None or each.name in only]
    hints = {each.name: each.annotation for each in parameters}
    sampling = hints.keys() & SAMPLING_FIELDS

    def decorate(function: Callable[[S], int]) -> Callable[..., int]:
        def command(**given: Any) -> int:
            values = {name: given.pop(name) for name in sampling}
            if values:
                given["sampling"] = {name: value for name, value in values.items() if value not in (None, [])}
            return function(settings(**given))

        command.__doc__ = function.__doc__
        command.__annotations__ = hints
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # Typer reads it
        return command

    return decorate


def _parameters(settings: type[Any]) -> Iterator[inspect.Parameter]:
    hints = typing.get_type_hints(settings, include_extras=True)
    for each in dataclasses.fields(settings):
        if SAMPLING in getattr(hints[each.name], "__metadata__", ()):
            for name, row in SAMPLING_FIELDS.items():
                if row.help is not None:
                    yield inspect.Parameter(
                        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_sampling_option(name, row)
                    )
        else:
            default = inspect.Parameter.empty if each.default is dataclasses.MISSING else each.default
            yield inspect.Parameter(
                each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[each.name]
            )


def _sampling_option(name: str, row: SamplingField) -> Any:
    option = f"--{(row.option or name).replace('_', '-')}"
    is_flag = isinstance(row.default, bool)
    value_type: Any = row.number or (bool if is_flag else list[str])
    names = f"{option}/--no-{option[2:]}" if is_flag else option
    return Annotated[value_type | None, typer.Option(names, metavar=row.metavar, help=row.help)]
