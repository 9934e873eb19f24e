"""The options of `deltarunner run`, each written once: as the help shows it, and as the command reads it."""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from runner.errors import BadOption
from runner.logs import LEVELS

__all__ = ["ENVIRONMENT", "JSON", "SERVED", "SETTINGS", "TEMPLATE_OPTION", "TOOL_FORMAT", "RunSettings", "options_from"]

S = TypeVar("S")

PROGRAM = "runner.environment.program:Program"
"""The environment of agent programs."""

ENVIRONMENT = typer.Argument(
    metavar="ENV",
    help="A bundled environment (`deltarunner list`), path.py:Class, or module:Class.",
    show_default=False,
)
SETTINGS = typer.Option("--set", metavar="NAME=VALUE", help="An argument of the environment's constructor.")
TEMPLATE_OPTION = typer.Option(
    "--template-option", metavar="NAME=VALUE", help="A name that the template reads (enable_thinking=false)."
)
TOOL_FORMAT = typer.Option(
    "--tool-format",
    metavar="vllm:NAME",
    help="Read calls with a tool parser of vLLM's; default as learnt from the template, which is seldom worse.",
)
JSON = typer.Option("--json", help="One line of JSON on stdout, everything else on stderr.")


SERVED = (
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
    "temperature",
    "max_tokens",
    "top_p",
    "top_k",
    "min_p",
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
"""The options of `deltarunner run` that `deltarunner serve` has too; a new one joins them once it works there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSettings:
    """What `deltarunner run` was told on the command line, not yet checked beyond its types.

    What was not given is None: `RunOptions` has the defaults, and takes too long to import for `--help`.
    """

    environment: Annotated[str | None, ENVIRONMENT] = None
    agent: Annotated[
        str | None, typer.Option(metavar="COMMAND", help="Play an agent program in place of ENV: 'claude -p {prompt}'.")
    ] = None
    check: Annotated[
        str | None, typer.Option(metavar="COMMAND", help="With --agent: ends with 0 where the program did its task.")
    ] = None
    copy: Annotated[Path | None, typer.Option(help="With --agent: the folder that it works in a copy of.")] = None
    wrap: Annotated[
        str | None,
        typer.Option(metavar="COMMAND", help="With --agent: what it runs behind, such as a sandbox; {folder}, {home}."),
    ] = None
    train: Annotated[
        bool | None,
        typer.Option(
            "--train/--no-train",
            help="Of agent programs: train all threads, or none; default those that are offered tools.",
        ),
    ] = None
    system_as_user: Annotated[
        bool | None,
        typer.Option(
            "--system-as-user",
            help="Of agent programs: system messages after the beginning are a user's, for templates that take none.",
        ),
    ] = None
    overflow: Annotated[
        str | None,
        typer.Option(
            metavar="tell|end",
            help="Of agent programs: tell a client that its history does not fit, or end the episode; default tell.",
        ),
    ] = None
    sent_history: Annotated[
        str | None,
        typer.Option(
            metavar="append|client",
            help="Of agent programs: go on from what the model said, or from what the client sends; default append.",
        ),
    ] = None
    episodes: Annotated[
        int | None, typer.Option("--episodes", "-n", min=1, help="How many to play; default all of its tasks.")
    ] = None
    model: Annotated[str, typer.Option(help="smollm2-135m, a folder, or a Hugging Face id.")] = "smollm2-135m"
    template: Annotated[
        str | None, typer.Option(help="Chat template: pythonic, hermes, or a file; default the model's own.")
    ] = None
    template_options: Annotated[list[str] | None, TEMPLATE_OPTION] = None
    tool_format: Annotated[str | None, TOOL_FORMAT] = None
    engine_options: Annotated[
        list[str] | None,
        typer.Option(
            "--engine-option",
            metavar="NAME=VALUE",
            help="An argument of vLLM's engine (max_num_seqs=64); with --server or --api-model of that (places=64).",
        ),
    ] = None
    server: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A server of vLLM or SGLang that samples, instead of vLLM in this process."),
    ] = None
    server_key: Annotated[
        str | None,
        typer.Option(envvar="DELTARUNNER_SERVER_KEY", help="What lets requests in there.", show_envvar=True),
    ] = None
    api_model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="A model behind an API of messages (OpenAI's form) speaks: to evaluate, not to train."
        ),
    ] = None
    api_url: Annotated[
        str | None, typer.Option(metavar="URL", help="The API's address, with /v1; default OpenAI's own.")
    ] = None
    api_key: Annotated[
        str | None,
        typer.Option(envvar="DELTARUNNER_API_KEY", help="What lets requests in there.", show_envvar=True),
    ] = None
    workers: Annotated[
        str | None,
        typer.Option(
            metavar="N", help="So many engines, with the episodes that they play: 4, or 8-64 as machines come."
        ),
    ] = None
    cluster: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="A cluster of Ray for --workers (auto); default RAY_ADDRESS, or its own."),
    ] = None
    worker_gpus: Annotated[
        float | None,
        typer.Option(
            metavar="N", min=0, help="GPUs that Ray counts for each worker; default as the engine's sizes say."
        ),
    ] = None
    worker_cpus: Annotated[
        float | None, typer.Option(metavar="N", min=0, help="The same of processor cores; default 1.")
    ] = None
    stall_seconds: Annotated[
        float | None,
        typer.Option(metavar="N", min=0, help="How long there may be too few workers before the run ends; 600."),
    ] = None
    settings: Annotated[list[str] | None, SETTINGS] = None
    tasks: Annotated[Path | None, typer.Option(help="Tasks from a JSONL file instead of the environment's own.")] = None
    group_size: Annotated[int | None, typer.Option(min=1, help="Episodes of each task; default 1.")] = None
    seed: Annotated[int | None, typer.Option(help="All random numbers follow from it; default 0.")] = None
    temperature: Annotated[float | None, typer.Option(help="0 is greedy; default 1.")] = None
    max_tokens: Annotated[int | None, typer.Option(help="The most tokens of one turn.")] = None
    min_tokens: Annotated[int | None, typer.Option(help="Nothing stops a turn before it has so many tokens.")] = None
    top_p: Annotated[float | None, typer.Option(help="Nucleus sampling.")] = None
    top_k: Annotated[int | None, typer.Option(help="Only the k likeliest tokens.")] = None
    min_p: Annotated[float | None, typer.Option(help="Drop tokens below this share of the likeliest one.")] = None
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1: discourage tokens of the prompt and the turn.")
    ] = None
    presence_penalty: Annotated[
        float | None, typer.Option(help="Above 0: discourage tokens that the turn has; -2 to 2.")
    ] = None
    frequency_penalty: Annotated[
        float | None, typer.Option(help="The same for each time that the turn has them; -2 to 2.")
    ] = None
    logit_bias: Annotated[
        list[str] | None, typer.Option(metavar="ID=BIAS", help="Add to the logit of a token id; -100 to 100.")
    ] = None
    bad_words: Annotated[list[str] | None, typer.Option("--bad-word", help="A word that is not sampled.")] = None
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends a turn.")] = None
    ignore_eos: Annotated[
        bool | None, typer.Option("--ignore-eos/--no-ignore-eos", help="The model's stop ids end no turn.")
    ] = None
    logprobs: Annotated[
        int | None, typer.Option(help="Keep the log-probabilities of so many likeliest ids; at most 20.")
    ] = None
    limits: Annotated[
        list[str] | None,
        typer.Option("--limit", metavar="NAME=VALUE", help="A limit of an episode (turns=8, seconds=60)."),
    ] = None
    history: Annotated[
        str | None, typer.Option(help="Where the chat template rewrites the past: append (default), fork or refuse.")
    ] = None
    listen: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Where episodes are served to agent programs.")
    ] = None
    concurrency: Annotated[int | None, typer.Option(min=1, help="Episodes alive at once.")] = None
    file: Annotated[Path | None, typer.Option(help="The run file; default runs/ENV-NNN.db.")] = None
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Play the failed episodes of the file again.")
    ] = False
    task: Annotated[str | None, typer.Option(help="Play only the task of this id; shown, not kept.")] = None
    index: Annotated[int | None, typer.Option(min=0, help="Of the task's group, only this episode.")] = None
    show: Annotated[int, typer.Option(min=0, help="Show so many transcripts at the end.")] = 0
    verbose: Annotated[
        bool, typer.Option("--verbose", help="A longer summary: how prompts were made, where the time went.")
    ] = False
    log_level: Annotated[
        str | None,
        typer.Option(
            metavar="|".join(LEVELS), help="Write deltarunner's own records of at least this level to the log."
        ),
    ] = None
    debug: Annotated[bool, typer.Option("--debug", help="Clocks off and one episode at a time, for breakpoint().")] = (
        False
    )
    json: Annotated[bool, JSON] = False

    @property
    def model_name(self) -> str:
        """The name of the model."""
        return self.model if self.api_model is None else self.api_model

    @property
    def played(self) -> str:
        """The name of the environment."""
        assert self.environment is not None, "who asks has asked for with_program() before"
        return self.environment

    def serving(self) -> dict[str, Any]:
        """The arguments of `OpenEpisodes` and `Program` that say how an episode is served; None for the default."""
        return {
            "train": self.train,
            "system_as_user": self.system_as_user,
            "overflow": self.overflow,
            "sent_history": self.sent_history,
        }

    def with_program(self) -> RunSettings:
        """The same with an environment in any case: `--agent` stands for the bundled one of programs.

        Raises:
            BadOption: there is neither or both, or an option of programs without one.
        """
        # Absolute where others look for it: a worker stands in a folder of its own.
        copy = self.copy.absolute() if self.copy is not None and self.workers is not None else self.copy
        of_program = {"agent": self.agent, "check": self.check, "copy": copy, "wrap": self.wrap, **self.serving()}
        given = {
            name: str(value).lower() if isinstance(value, bool) else value
            for name, value in of_program.items()
            if value is not None
        }
        if self.agent is None and given:
            name = next(iter(given)).replace("_", "-")
            raise BadOption(f"--{name} goes with --agent: give the program's command.")
        if self.agent is None and self.environment is None:
            raise BadOption("say what is played: an environment (`deltarunner list`), or --agent 'COMMAND {prompt}'.")
        if self.agent is None:
            return self
        if self.environment is not None:
            raise BadOption(f"{self.environment} and --agent: give one of them.")
        if self.tasks is None:
            raise BadOption(
                '--agent: give the prompts, --tasks FILE.jsonl, of lines such as {"id": ..., "prompt": ...}.'
            )
        own = [f"{name}={value}" for name, value in given.items()]
        return dataclasses.replace(self, environment=PROGRAM, settings=[*own, *(self.settings or [])])


def options_from(
    settings: type[S], only: Collection[str] | None = None
) -> Callable[[Callable[[S], int]], Callable[..., int]]:
    """Make a command of a function that takes its options as one object: each field becomes an option.

    Args:
        settings: a dataclass whose fields are annotated as Typer wants parameters.
        only: the fields that become options; None for all of them.
    """
    hints = typing.get_type_hints(settings, include_extras=True)  # the text of annotations as what it means
    parameters = [
        inspect.Parameter(
            each.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if each.default is dataclasses.MISSING else each.default,
            annotation=hints[each.name],
        )
        for each in dataclasses.fields(settings)  # type: ignore[arg-type]  # the caller sees to it
        if only is None or each.name in only
    ]

    def decorate(function: Callable[[S], int]) -> Callable[..., int]:
        def command(**given: Any) -> int:
            return function(settings(**given))

        command.__doc__ = function.__doc__
        command.__annotations__ = hints
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # where Typer looks
        return command

    return decorate
