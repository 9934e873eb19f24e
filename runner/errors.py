"""All errors of deltarunner, in one tree.

DeltarunnerError                 base class of all errors
├── BadInput                     invalid input; the message names it and the fix
│   ├── BadOption                an option, limit or setting
│   ├── BadEnvironment           an environment class: unknown, no reward, a wrong tool signature
│   ├── BadTask                  a task: no id, a duplicate id, unknown keys
│   ├── BadMessage               a message: a missing or wrong role, a tool result that answers no call
│   ├── BadModel                 a model that cannot be found or loaded
│   ├── BadWeights               weights that do not fit the model; detected before the engine changes
│   ├── BadBatch                 a batch that cannot be generated from or trained on
│   ├── BadControl               a control call that the engine's state does not allow: an update while it sleeps
│   └── BadTemplate              a chat template that cannot serve the run
├── RunFileError                 the run file cannot be used
│   ├── ConfigurationChanged     the file contains a run with another configuration
│   ├── NewerRunFile             the file was written by a newer version
│   └── StorageFailed            the disk is full, the folder read-only, the file damaged or locked
├── EngineError                  the engine failed; the episode is not the cause, and may be played again
│   ├── EngineDead               the engine cannot answer any further request
│   ├── RequestRejected          the engine refused this one request
│   │   └── PromptTooLong        the history does not fit the model's context, according to its server
│   └── EngineStalled            the engine admitted a request, then sent nothing for `stall_seconds`
├── ProgramFailed                an agent program ended with an error; its episode is `env_error`
├── JudgeFailed                  a judge wrote no score; its episode is `env_error`
├── ServerFailed                 a server of an environment failed; its episode is `env_error`
├── SandboxFailed                a sandbox cannot be made or used; its episode is `env_error`
│   ├── ImageBuildFailed         the build of its image fails
│   ├── SandboxGone              the sandbox was removed or stopped from outside
│   └── SandboxUnavailable       this machine has no podman or docker that works
├── VerifierFailed               a verifier wrote no reward; its episode is `env_error`
├── RunStopped                   the run ended before its work was complete
│   ├── TooManyFailures          the error rate exceeded the limit
│   └── RunStuck                 no progress; the message lists the waiting parts
├── BelowThreshold               the run is complete, and a result is below `--fail-under`
├── EpisodeOver                  raised in a `rollout` whose episode has ended; need not be caught
│   └── ContextFull              a prompt does not fit the model's context; a shorter history may fit
└── ToolError                    raised by a tool: the model reads its text
    └── WrongArguments           the model called a tool with invalid arguments
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "BadBatch",
    "BadControl",
    "BadEnvironment",
    "BadInput",
    "BadMessage",
    "BadModel",
    "BadOption",
    "BadTask",
    "BadTemplate",
    "BadWeights",
    "BelowThreshold",
    "ConfigurationChanged",
    "ContextFull",
    "DeltarunnerError",
    "EngineDead",
    "EngineError",
    "EngineStalled",
    "EpisodeOver",
    "ImageBuildFailed",
    "JudgeFailed",
    "NewerRunFile",
    "ProgramFailed",
    "PromptTooLong",
    "RequestRejected",
    "RunFileError",
    "RunStopped",
    "RunStuck",
    "SandboxFailed",
    "SandboxGone",
    "SandboxUnavailable",
    "ServerFailed",
    "StorageFailed",
    "TooManyFailures",
    "ToolError",
    "VerifierFailed",
    "WrongArguments",
]


def unwrapped(error: BaseException) -> BaseException:
    """Return the only error in nested exception groups; the error itself if it is not a group, or contains several.

    Task groups also wrap single errors.
    """
    inner = error
    while isinstance(inner, BaseExceptionGroup):
        if len(inner.exceptions) != 1:
            return error
        inner = inner.exceptions[0]
    return inner


def one_line(error: BaseException) -> str:
    """Return type and text of an error without line breaks, at most 1000 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:1000]


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text; the name of its type if the text is empty."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


class DeltarunnerError(Exception):
    """Base class of every error that deltarunner raises on purpose."""

    exit_code: ClassVar[int] = 1
    """Exit code of the command line for this error."""

    def __init_subclass__(cls, *, exit_code: int | None = None) -> None:
        super().__init_subclass__()
        if exit_code is not None:
            cls.exit_code = exit_code


class BadInput(DeltarunnerError, exit_code=2):
    """Input that cannot be used; the message names it and the fix."""


class BadOption(BadInput, ValueError):
    """An invalid option, limit or setting."""


class BadEnvironment(BadInput, exit_code=3):
    """An environment that cannot be found or played."""


class BadTask(BadInput, exit_code=4):
    """A task that cannot be played: no id, a duplicate id, unknown keys."""


class BadMessage(BadInput, TypeError):
    """An invalid message; the text names its position in the input."""


class BadModel(BadInput, exit_code=5):
    """A model that cannot be found or loaded."""


class BadWeights(BadInput, exit_code=5):
    """Weights that do not fit the model; the text names the tensor. The old weights and their version are kept."""


class BadBatch(BadInput, ValueError):
    """A batch that cannot be generated from or trained on; the text names the row."""


class BadControl(BadInput, RuntimeError):
    """A control call that the engine's state does not allow: a resume without a pause, an update while it sleeps."""


class BadTemplate(BadInput, exit_code=6):
    """A chat template that cannot serve the run; the text names the missing property."""


class RunFileError(DeltarunnerError, exit_code=7):
    """The run file cannot be used; its contents are unchanged."""


class ConfigurationChanged(RunFileError):
    """The file contains a run with another configuration; the text lists the differences."""


class NewerRunFile(RunFileError):
    """The file was written by a newer version of deltarunner."""


class StorageFailed(RunFileError, exit_code=8):
    """The file cannot be opened or written; everything that was reported as stored is in it."""


class EngineError(DeltarunnerError, exit_code=9):
    """The engine failed. The episode is not the cause and may be played again."""


class EngineDead(EngineError):
    """The engine cannot answer any further request."""


class RequestRejected(EngineError):
    """The engine refused this one request."""


class PromptTooLong(RequestRejected):
    """The history does not fit the context of a server's model, by the server's own count."""

    def __init__(self, text: str, *, prompt: int = 0, context: int = 0) -> None:
        super().__init__(text)
        self.prompt = prompt
        """Tokens of the prompt if the server reports them; else 0."""
        self.context = context
        """Maximum number of tokens of prompt and turn together if the server reports it; else 0."""


class EngineStalled(EngineError):
    """The engine admitted a request, then sent nothing for `stall_seconds`."""


class RunStopped(DeltarunnerError, exit_code=10):
    """The run ended before its work was complete; finished episodes are kept."""


class TooManyFailures(RunStopped):
    """More episodes failed than the run's `breaker` allows."""


class RunStuck(RunStopped, exit_code=11):
    """The run no longer made progress; the text lists the waiting parts."""


class BelowThreshold(DeltarunnerError, exit_code=4):
    """The run is complete, and a result is below `--fail-under`."""


class ProgramFailed(DeltarunnerError):
    """An agent program that an environment ran ended with an error; the text has its last lines of output."""


class ServerFailed(DeltarunnerError):
    """A server that an environment uses failed, is gone, or cannot be reached.

    The text has the last output of a server process, if there is any.
    """


class SandboxFailed(DeltarunnerError, exit_code=3):
    """A sandbox cannot be made or used, and the model is not the cause; the episode is `env_error`."""


class ImageBuildFailed(SandboxFailed):
    """The build of a sandbox's image fails or takes too long; the text has its last output."""


class SandboxGone(SandboxFailed):
    """A sandbox was removed or stopped from outside."""


class SandboxUnavailable(SandboxFailed):
    """This machine has no podman or docker that works; the text has the reason for each."""


class VerifierFailed(DeltarunnerError):
    """The verifier or the scorer of a task gave no reward, or no number; the text has its last output."""


class JudgeFailed(DeltarunnerError):
    """A judge wrote no score in its range; the text has its last answer, or the reason."""


class EpisodeOver(DeltarunnerError):
    """The episode has ended, for example because a limit was reached or its engine failed.

    `Conversation.generate` raises this. A `rollout` may end with it.
    """


class ContextFull(EpisodeOver):
    """A prompt does not fit the model's context; a shorter history may fit."""

    def __init__(self, text: str, *, prompt: int, context: int) -> None:
        super().__init__(text)
        self.prompt = prompt
        """Minimum number of ids of the prompt."""
        self.context = context
        """Maximum number of ids of prompt and turn together."""


class ToolError(DeltarunnerError):
    """An error that a tool raises for the model, which reads its text as the tool's result. The episode continues."""


class WrongArguments(ToolError):
    """The model called a tool with invalid arguments; the model reads which arguments are invalid, and why."""
