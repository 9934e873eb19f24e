"""Every error of deltarunner, in one tree.

DeltarunnerError                 catch this to catch all of them
├── BadInput                     something given to us cannot be used; the message names it and the fix
│   ├── BadOption                an option, limit or setting
│   ├── BadEnvironment           an environment class: unknown, no reward, a wrong tool signature
│   ├── BadTask                  a task: no id, an id twice, unknown keys
│   ├── BadMessage               a message: no role or a wrong one, a tool's result that answers no call
│   ├── BadModel                 a model that cannot be found or loaded
│   ├── BadWeights               weights that do not fit the model; found before the engine was touched
│   ├── BadBatch                 a batch that cannot be generated from or trained on
│   ├── BadControl               a control that cannot be as the engine is now: an update while it sleeps
│   └── BadTemplate              a chat template that cannot serve the run
├── RunFileError                 the run file
│   ├── ConfigurationChanged     the file holds a run of another configuration
│   ├── NewerRunFile             the file was written by a newer version
│   └── StorageFailed            the disk is full, the folder read-only, the file damaged or locked
├── EngineError                  the engine; retried, never the episode's fault
│   ├── EngineDead               no request can be answered any more
│   ├── RequestRejected          this one request was refused
│   │   └── PromptTooLong        the history does not fit the model's context, as its server says
│   └── EngineStalled            admitted, then silent for `stall_seconds`
├── ProgramFailed                an agent program ended with an error; its episode is `env_error`
├── RunStopped                   the run ended before its work did
│   ├── TooManyFailures          the error-rate circuit breaker
│   └── RunStuck                 nothing happened any more; names who waits for what
├── EpisodeOver                  raised to a `rollout` when its episode can speak no more; may be left uncaught
│   └── ContextFull              a prompt does not fit the model's context; a shorter history may
└── ToolError                    raised by a tool: its text is what the model reads
    └── WrongArguments           the model called a tool with arguments that do not fit
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
    "ConfigurationChanged",
    "ContextFull",
    "DeltarunnerError",
    "EngineDead",
    "EngineError",
    "EngineStalled",
    "EpisodeOver",
    "NewerRunFile",
    "ProgramFailed",
    "PromptTooLong",
    "RequestRejected",
    "RunFileError",
    "RunStopped",
    "RunStuck",
    "StorageFailed",
    "TooManyFailures",
    "ToolError",
    "WrongArguments",
]


def unwrapped(error: BaseException) -> BaseException:
    """The one error that a group of groups holds; the error itself where it is no group, or holds several.

    Task groups wrap what leaves them, also where it is a single error.
    """
    inner = error
    while isinstance(inner, BaseExceptionGroup):
        if len(inner.exceptions) != 1:
            return error
        inner = inner.exceptions[0]
    return inner


def one_line(error: BaseException) -> str:
    """The kind of an error and all its text, without line breaks; another library's may be pages long."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:1000]


def first_line(error: BaseException) -> str:
    """The first line of an error's text; its kind where it has none."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


class DeltarunnerError(Exception):
    """The base of every error that deltarunner raises on purpose."""

    exit_code: ClassVar[int] = 1
    """The code that the command line ends with when the error reaches it."""

    def __init_subclass__(cls, *, exit_code: int | None = None) -> None:
        super().__init_subclass__()
        if exit_code is not None:
            cls.exit_code = exit_code


class BadInput(DeltarunnerError, exit_code=2):
    """Something given to deltarunner cannot be used; the message names the thing and the fix."""


class BadOption(BadInput, ValueError):
    """An option, a limit or a setting that cannot be."""


class BadEnvironment(BadInput, exit_code=3):
    """An environment that cannot be found or cannot be played."""


class BadTask(BadInput, exit_code=4):
    """A task that cannot be played: no id, an id twice, keys that nothing reads."""


class BadMessage(BadInput, TypeError):
    """A message that cannot be put before a model; names which one, by its place in what was given."""


class BadModel(BadInput, exit_code=5):
    """A model that cannot be found or loaded."""


class BadWeights(BadInput, exit_code=5):
    """Weights that do not fit the model; names the tensor. The old weights stay, and so does their version."""


class BadBatch(BadInput, ValueError):
    """A batch that cannot be generated from or trained on; names the row."""


class BadControl(BadInput, RuntimeError):
    """What was asked of the engine cannot be as it is now: a resume without a pause, an update while it sleeps."""


class BadTemplate(BadInput, exit_code=6):
    """A chat template that cannot serve the run; names the property that is missing."""


class RunFileError(DeltarunnerError, exit_code=7):
    """The run file cannot be used as asked; what it holds is untouched."""


class ConfigurationChanged(RunFileError):
    """The file holds a run of another configuration; the message lists what differs."""


class NewerRunFile(RunFileError):
    """The file was written by a newer version of deltarunner."""


class StorageFailed(RunFileError, exit_code=8):
    """The file cannot be opened or written; what was announced is in it."""


class EngineError(DeltarunnerError, exit_code=9):
    """The engine failed; the episode is not to blame and may be played again."""


class EngineDead(EngineError):
    """The engine can answer no request any more."""


class RequestRejected(EngineError):
    """The engine refused this one request."""


class PromptTooLong(RequestRejected):
    """The history does not fit the context of a server's model, by the server's own count."""

    def __init__(self, text: str, *, prompt: int = 0, context: int = 0) -> None:
        super().__init__(text)
        self.prompt = prompt
        """How many tokens the prompt has, where the server says; else 0."""
        self.context = context
        """How many tokens prompt and turn may have together, where the server says; else 0."""


class EngineStalled(EngineError):
    """The engine admitted a request and then sent nothing for `stall_seconds`."""


class RunStopped(DeltarunnerError, exit_code=10):
    """The run ended before its work did; what was finished is kept."""


class TooManyFailures(RunStopped):
    """More episodes failed than the run's `breaker` allows."""


class RunStuck(RunStopped, exit_code=11):
    """Nothing happened any more; the message names who waits for what."""


class ProgramFailed(DeltarunnerError):
    """An agent program that an environment ran ended with an error; the message has the last lines that it printed."""


class EpisodeOver(DeltarunnerError):
    """The episode can speak no more: a limit was reached, or its tokens or its engine failed.

    Raised by `Conversation.generate`. Leaving `rollout` with it is normal.
    """


class ContextFull(EpisodeOver):
    """A prompt does not fit the model's context; a shorter history may."""

    def __init__(self, text: str, *, prompt: int, context: int) -> None:
        super().__init__(text)
        self.prompt = prompt
        """How many ids the prompt has, at least."""
        self.context = context
        """How many ids prompt and turn may have together."""


class ToolError(DeltarunnerError):
    """Raise it in a tool: the model reads its text as the tool's result, and play goes on."""


class WrongArguments(ToolError):
    """The model called a tool with arguments that do not fit; its text tells the model which and why."""
