"""The commands of `deltarunner`, with options and help texts. Other modules of this package implement the commands."""

from __future__ import annotations

import functools
import signal
import sys
import traceback
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, NoReturn, TextIO, TypeVar

import typer
from typer.core import TyperGroup

from runner.cli.settings import (
    ENVIRONMENT,
    JSON,
    LOG_LEVEL,
    PRICES,
    SERVED,
    SETTINGS,
    TEMPLATE_OPTION,
    TOOL_FORMAT,
    RunSettings,
    ServeSettings,
    options_from,
)
from runner.errors import DeltarunnerError

__all__ = ["app", "exit_code_of", "main"]

Command = TypeVar("Command", bound=Callable[..., int])

BROKEN_PIPE_CODE = 128 + signal.SIGPIPE
"""Exit code, 141, if the reader of the output closed the pipe, as for other Unix tools."""

EPILOG = """
Exit codes: 0 done · 1 unexpected error · 2 invalid option · 3 environment cannot be used · 4 invalid task, or a result
below --fail-under · 5 model cannot be loaded · 6 chat template cannot be used · 7 run file cannot be used, wrong new
weights, or wrong ids of a trace · 8 disk error, or locked file · 9 engine failed · 10 too many episodes failed
· 11 the run was stuck · 130 Ctrl-C · 141 the reader of the output is gone.
"""


class Commands(TyperGroup):
    """The group of all commands. The error for an unknown command lists the known ones."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        known = self.list_commands(ctx)
        if args and args[0] not in known and not args[0].startswith("-"):
            close = get_close_matches(args[0], known, 1)
            meant = f" Did you mean {close[0]!r}?" if close else ""
            ctx.fail(f"No such command {args[0]!r}.{meant} The commands are {', '.join(known)}.")
        name, command, rest = super().resolve_command(ctx, args)
        if name == "show" and command is not None:
            rest = _ids_after_options(rest, [option for each in command.params for option in each.opts])
        return name, command, rest


def _ids_after_options(args: list[str], options: list[str]) -> list[str]:
    """Move each episode id that begins with a dash to the end, after `--`, so that it is not read as an option."""
    options = [option for option in options if option.startswith("-")] + ["-h", "--help"]
    if "--" in args:
        return args

    def is_id(word: str) -> bool:
        option = word.partition("=")[0]
        if not word.startswith("-") or word == "-" or option in options:
            return False
        return "#" in word or (word[:2] not in options and not get_close_matches(option, options, 1, 0.75))

    values = {place + 1 for place, word in enumerate(args) if word == "--sort"}  # a sort key may begin with a dash
    ids = [word for place, word in enumerate(args) if place not in values and is_id(word)]
    return [
        *(word for place, word in enumerate(args) if place in values or not is_id(word)),
        *(["--", *ids] if ids else []),
    ]


app = typer.Typer(
    cls=Commands,
    name="deltarunner",
    help="Play many multi-turn agent episodes concurrently on vLLM in this process, and keep the exact token ids.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(requested: bool) -> None:
    if requested:
        from runner.version import __version__

        print(f"deltarunner {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options of `deltarunner` itself, before any command."""


def main() -> NoReturn:
    """Run the command line, and end the process with the exit code of the command."""
    try:
        app()
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    # Only commands that play episodes have threads that may hang. Other commands do not load this module.
    if "runner.runs.event_loop" in sys.modules:
        from runner.runs.event_loop import end_process

        end_process(code)
    sys.exit(code)


def command(name: str) -> Callable[[Command], Command]:
    """Return a decorator that registers a function as the command `name`.

    The function returns the exit code of the process. `exit_code_of` handles its errors.
    """

    def register(function: Command) -> Command:
        @functools.wraps(function)
        def shown(*arguments: object, **options: object) -> NoReturn:
            sys.exit(exit_code_of(functools.partial(function, *arguments, **options)))

        app.command(name)(shown)
        return function

    return register


def exit_code_of(body: Callable[[], int]) -> int:
    """Run a command and return its exit code; print an error as one message."""
    try:
        code = body()
        sys.stdout.flush()  # at exit, Python would print an error about a closed pipe
        return code
    except DeltarunnerError as error:
        _print_error(f"deltarunner: {error}")
        return error.exit_code
    except KeyboardInterrupt as interrupt:
        _print_error(f"deltarunner: interrupted{_author_place(interrupt)}")
        return 130
    except BrokenPipeError:
        _discard(sys.stdout)
        return BROKEN_PIPE_CODE
    except Exception as error:
        _print_error(
            f"{traceback.format_exc()}deltarunner: {type(error).__name__}: {error}\n"
            f"This is a bug; please report it with the lines above."
        )
        return 1


def _author_place(error: BaseException) -> str:
    """The innermost place in an author's code, such as a `tasks()` that does not end; "" if there is none."""
    from runner.concurrency.user_code import is_foreign

    frames = [each for each in traceback.extract_tb(error.__traceback__) if not is_foreign(each.filename)]
    return f" in {frames[-1].name}(), {frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _print_error(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    except BrokenPipeError:
        _discard(sys.stderr)


def _discard(stream: TextIO) -> None:
    from runner.runs.reporter import discard

    discard(stream)


@command("run")
@options_from(RunSettings)
def run(settings: RunSettings) -> int:
    """Play an environment's episodes and store them in a run file. The same command again resumes an incomplete run."""
    from runner.cli.run import run_command

    return run_command(settings.with_program())


@command("serve")
@options_from(ServeSettings, SERVED)
def serve(settings: ServeSettings) -> int:
    """Serve episodes to agent programs that you start yourself, or ENV to a trainer (--as verifiers).

    Each episode for an agent program has a key, printed with the settings.
    """
    from runner.cli.serve import serve_command

    return serve_command(settings)


@command("list")
def list_environments() -> int:
    """List the installed environments."""
    from runner.cli.list import list_command

    return list_command()


@command("show")
def show(
    file: Annotated[Path, typer.Argument(help="A run file.")],
    episode: Annotated[str | None, typer.Argument(help="An episode's id, such as calculator-0#0.")] = None,
    agent: Annotated[str | None, typer.Option(help="Show this agent, if the episode has several.")] = None,
    tokens: Annotated[bool, typer.Option("--tokens", help="Also show the token ids.")] = False,
    brief: Annotated[bool, typer.Option("--brief", help="Leave out the text of the chat template.")] = False,
    requests: Annotated[
        bool, typer.Option("--requests", help="Show the chat requests of an external agent instead of the transcript.")
    ] = False,
    limit: Annotated[int, typer.Option("-n", "--limit", min=1, help="Rows of the table.")] = 50,
    failed: Annotated[bool, typer.Option("--failed", help="Only failed episodes.")] = False,
    where: Annotated[
        list[str] | None,
        typer.Option(metavar="CONDITION", help="Only episodes with 'reward < 0.5', 'error ~ text'; may be repeated."),
    ] = None,
    sort: Annotated[
        str | None, typer.Option(metavar="FIELD", help="Sort by a field, reward or metric; -FIELD: highest first.")
    ] = None,
    by: Annotated[str | None, typer.Option(metavar="FIELD", help="Mean reward by a field of the tasks.")] = None,
    fail_under: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=NUMBER", help="Exit code 4 if reward, a metric, pass@k or pass^k is lower."),
    ] = None,
    prices: Annotated[Path | None, PRICES] = None,
) -> int:
    """Show a run file: a table of its episodes, or the transcript of one."""
    from runner.cli.show import RowOptions, show_command

    chosen = RowOptions(
        failed=failed, where=tuple(where or ()), sort=sort, by=by, fail_under=tuple(fail_under or ()), prices=prices
    )
    return show_command(
        file, episode, agent=agent, tokens=tokens, brief=brief, requests=requests, limit=limit, chosen=chosen
    )


@command("export")
def export(
    file: Annotated[Path, typer.Argument(help="A run file.")],
    format: Annotated[str, typer.Option(help="jsonl, parquet or openenv.")] = "jsonl",
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Output file; default next to the run file; - is stdout.")
    ] = None,
    outcome: Annotated[
        list[str] | None, typer.Option(help="Only episodes with this outcome, such as completed; may be repeated.")
    ] = None,
    agent: Annotated[list[str] | None, typer.Option(help="Only trajectories of this agent; may be repeated.")] = None,
    task: Annotated[list[str] | None, typer.Option(metavar="ID", help="Only this task; may be repeated.")] = None,
    min_reward: Annotated[float | None, typer.Option(help="Only trajectories with at least this reward.")] = None,
    limit: Annotated[int | None, typer.Option("-n", "--limit", min=1, help="Only the first N trajectories.")] = None,
) -> int:
    """Write the trajectories of a run file as JSONL, Parquet or traces of OpenEnv."""
    from runner.cli.export import export_command
    from runner.store.trajectory_filter import TrajectoryFilter

    chosen = TrajectoryFilter(
        outcomes=tuple(outcome or ()),
        agents=tuple(agent or ()),
        tasks=tuple(task or ()),
        min_reward=min_reward,
        most=limit,
    )
    return export_command(file, format=format, output=output, chosen=chosen)


@command("compare")
def compare(
    files: Annotated[list[Path], typer.Argument(metavar="A.db B.db ...", help="Run files; A is the baseline.")],
    by: Annotated[
        str | None, typer.Option(metavar="FIELD", help="Also compare for each value of this field of the tasks.")
    ] = None,
    json: Annotated[bool, JSON] = False,
) -> int:
    """Compare run files with the first one, task by task: the better file, the differences, and tasks lost or won."""
    from runner.cli.compare import compare_command

    return compare_command(files, by=by, as_json=json)


@command("report")
def report(
    file: Annotated[Path, typer.Argument(help="A run file.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Output file; default next to the run file, .html.")
    ] = None,
    episodes: Annotated[
        int, typer.Option("--episodes", "-n", min=1, help="Maximum number of episodes; failed ones come first.")
    ] = 2000,
    tokens: Annotated[bool, typer.Option("--tokens/--no-tokens", help="Include token ids and probabilities.")] = True,
    against: Annotated[
        Path | None, typer.Option(metavar="A.db", help="Also compare with this run file, the baseline.")
    ] = None,
    by: Annotated[str | None, typer.Option(metavar="FIELD", help="With --against: also compare by this field.")] = None,
    prices: Annotated[Path | None, PRICES] = None,
) -> int:
    """Write a page about a run file: one HTML file that needs no network, for a colleague or a pull request."""
    from runner.cli.page import report_command

    return report_command(file, output=output, episodes=episodes, tokens=tokens, against=against, by=by, prices=prices)


@command("view")
def view(
    path: Annotated[Path, typer.Argument(metavar="FILE|FOLDER", help="A run file, or a folder with run files.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0 takes a free one.")] = 0,
    prices: Annotated[Path | None, PRICES] = None,
) -> int:
    """Serve the page of a run file on this machine, read-only: for large files, and for a run that still plays."""
    from runner.cli.page import view_command

    return view_command(path, port=port, prices=prices)


@command("label")
def label(
    file: Annotated[Path, typer.Argument(help="A run file.")],
    episode: Annotated[str | None, typer.Argument(help="An episode's id; without one, all labels are listed.")] = None,
    label: Annotated[list[str] | None, typer.Option(metavar="NAME", help="A label; may be repeated.")] = None,
    note: Annotated[str | None, typer.Option(metavar="TEXT", help="A note.")] = None,
    reader: Annotated[str | None, typer.Option(metavar="NAME", help="Your name; default: your account's.")] = None,
    remove: Annotated[bool, typer.Option("--remove", help="Remove what you wrote about the episode.")] = False,
) -> int:
    """Keep labels and a note about an episode in a file beside the run file; pages and `show` display them."""
    from runner.cli.label import label_command

    return label_command(file, episode, labels=tuple(label or ()), note=note, reader=reader, remove=remove)


@command("verify")
def verify(
    file: Annotated[Path, typer.Argument(help="A run file.")],
    model: Annotated[
        list[str] | None, typer.Option(metavar="FOLDER", help="The run's model, if its folder has moved.")
    ] = None,
    json: Annotated[bool, JSON] = False,
) -> int:
    """Rebuild every prompt of a run file from its messages and sampled ids, and report differences."""
    from runner.cli.verify import verify_command

    return verify_command(file, models=tuple(model or ()), json=json)


@command("verify-trace")
def verify_trace(
    file: Annotated[Path, typer.Argument(help="Traces of OpenEnv or verifiers, or rows like TRL's; JSON or JSONL.")],
    model: Annotated[str, typer.Option(help="The model that sampled the ids: folder, Hugging Face id, smollm2-135m.")],
    template: Annotated[
        str | None, typer.Option(help="Chat template: pythonic, hermes, or a file; default: the model's.")
    ] = None,
    template_option: Annotated[list[str] | None, TEMPLATE_OPTION] = None,
    now: Annotated[
        str | None, typer.Option(metavar="DATE", help="The date that the template wrote, such as 2026-03-14.")
    ] = None,
    score: Annotated[
        bool, typer.Option("--score", help="Start vLLM with the model, and compare the log-probabilities too.")
    ] = False,
    tolerance: Annotated[
        float | None, typer.Option(metavar="NATS", help="Allowed difference of a log-probability; default 0.5.")
    ] = None,
    sampling: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="The trace's sampling, such as temperature=0.7.")
    ] = None,
    engine_option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="An argument of vLLM's engine (dtype=bfloat16).")
    ] = None,
    log_level: Annotated[str | None, LOG_LEVEL] = None,
    json: Annotated[bool, JSON] = False,
) -> int:
    """Check whether the ids of traces of other libraries are the ids that the model saw. Exit code 7 if not."""
    from runner.cli.verify_trace import ScoreOptions, verify_trace_command

    given = ScoreOptions(tuple(engine_option or ()), tuple(sampling or ()), tolerance, log_level)
    options = tuple(template_option or ())
    return verify_trace_command(
        file, model=model, template=template, options=options, now=now, score=score, score_options=given, as_json=json
    )


@command("check-template")
def check_template(
    name: Annotated[
        str, typer.Argument(metavar="MODEL|FILE", help="A model, its folder, a .jinja file, or a bundled template.")
    ],
    template: Annotated[
        str | None, typer.Option(help="Check the model with this chat template: pythonic, hermes, or a file.")
    ] = None,
    template_option: Annotated[list[str] | None, TEMPLATE_OPTION] = None,
    tool_format: Annotated[str | None, TOOL_FORMAT] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")] = False,
) -> int:
    """Show the properties of a chat template, and which messages can be appended exactly to a sampled turn."""
    from runner.cli.check_template import check_template_command

    options = tuple(template_option or ())
    return check_template_command(name, template=template, options=options, tool_format=tool_format, as_json=json)


@command("check-weights")
def check_weights(
    model: Annotated[str, typer.Argument(help="A folder, a Hugging Face id, or smollm2-135m.")],
    tiny: Annotated[
        bool, typer.Option("--tiny", help="Few layers and random weights; reads only the folder's config.json.")
    ] = False,
    way: Annotated[
        list[str] | None,
        typer.Option(
            help="One of folder, state-dict, twice, under-turns, after-sleep, transfer, same, adapter; default all."
        ),
    ] = None,
    engine_option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="An argument of vLLM's engine (dtype=bfloat16).")
    ] = None,
    log_level: Annotated[str | None, LOG_LEVEL] = None,
    json: Annotated[bool, JSON] = False,
) -> int:
    """Update each kind of tensor, and compare vLLM with transformers. Exit code 7 if one is wrong or none is right."""
    from runner.cli.check_weights import check_weights_command

    return check_weights_command(
        model,
        tiny=tiny,
        ways=tuple(way or ()),
        options=tuple(engine_option or ()),
        as_json=json,
        log_level=log_level,
    )


@command("new")
def new(
    name: Annotated[str, typer.Argument(help="Name of the project, such as word-game.", show_default=False)],
    folder: Annotated[
        Path | None, typer.Option(metavar="PATH", help="Folder to create; default a folder of that name.")
    ] = None,
) -> int:
    """Create a project: a working environment, its tests, pyproject.toml and CI."""
    from runner.cli.new import new_command

    return new_command(name, folder)


@command("check")
def check(
    environment: Annotated[str, ENVIRONMENT],
    settings: Annotated[list[str] | None, SETTINGS] = None,
    episodes: Annotated[int, typer.Option("--episodes", "-n", min=1, help="Number of tasks to try.")] = 4,
    tasks: Annotated[Path | None, typer.Option(help="JSONL file of tasks; default: the environment's.")] = None,
) -> int:
    """Check an environment without a model, and report its mistakes."""
    from runner.cli.check import check_command

    return check_command(environment, tuple(settings or ()), episodes=episodes, tasks=tasks)


if __name__ == "__main__":
    main()
