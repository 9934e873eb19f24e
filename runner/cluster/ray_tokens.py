"""The authentication token that a process shows to a Ray cluster."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

__all__ = ["VARIABLES", "admit", "give_own_token", "restore_variables"]

_MODE: Final = "RAY_AUTH_MODE"
_TOKEN: Final = "RAY_AUTH_TOKEN"
_PATH: Final = "RAY_AUTH_TOKEN_PATH"

VARIABLES: Final = (_MODE, _PATH)
"""The environment variables that are set while this process is connected."""

_FIX: Final = (
    "Copy the file ~/.ray/auth_token of the machine of `ray start --head` to the same place on this machine, or name a "
    "copy in RAY_AUTH_TOKEN_PATH; or set RAY_AUTH_MODE=disabled on every machine before `ray start`, which then lets "
    "everybody in who reaches the head. Ray asks for tokens where it finds that file, which it makes for a program "
    "that starts a cluster of its own."
)


def give_own_token(until_left: ExitStack) -> None:
    """Create a token for a cluster of this process, in a place where other clusters do not look.

    Ray would write one to ~/.ray/auth_token, and the next `ray start` on this machine would require it from all
    machines.

    Args:
        until_left: removes the token when it is closed, before `restore_variables` is called.
    """
    default = Path.home() / ".ray" / "auth_token"
    if os.environ.get(_MODE, "token") != "token" or {_TOKEN, _PATH} & os.environ.keys() or default.exists():
        return
    name = "ray._private.authentication.authentication_token_generator"
    try:
        make = importlib.import_module(name).generate_new_authentication_token
    except (ImportError, AttributeError):  # an older Ray, without tokens
        return
    folder = until_left.enter_context(TemporaryDirectory(prefix="deltarunner-ray-", ignore_cleanup_errors=True))
    path = Path(folder) / "auth_token"
    path.write_text(make())
    os.environ[_PATH] = str(path)
    _read_again()


def admit(address: str) -> str | None:
    """Choose whether this process shows a token to a running cluster, as the cluster requires.

    By itself Ray shows one only to "auto", and there also to a cluster without tokens, which then ends every actor.

    Returns:
        Why the cluster refuses this process with every token it has, and the fix; None if it accepts, or does not
        answer.
    """
    raylet = importlib.import_module("ray._raylet")
    loader = getattr(raylet, "AuthenticationTokenLoader", None)
    if loader is None:  # an older Ray, without tokens
        return None
    try:
        services: Any = importlib.import_module("ray._private.services")
        place: str = services.canonicalize_bootstrap_address_or_die(address, None)
    except Exception:  # no cluster, which `ray.init` reports too
        return None
    has_token: bool = loader.instance().has_token(ignore_auth_mode=True)
    given = os.environ.get(_MODE)
    modes = ("disabled", "token") if given is None else (given,)
    for mode in modes:
        if mode == "token" and not has_token:  # Ray would end this process
            continue
        _set_mode(mode)
        try:
            raylet.GcsClient(address=place)
        except importlib.import_module("ray.exceptions").AuthenticationError:
            continue
        except Exception:  # any other error is reported by `ray.init`
            pass
        if given is None and mode == "disabled" and not (address == "auto" and has_token):
            _set_mode(None)
        return None
    has = "this machine has none" if not has_token else "the one of this machine is not the right one"
    asked = "RAY_AUTH_MODE=disabled is set here" if given == "disabled" else has
    return f"it asks for a token, and {asked}. {_FIX}"


def restore_variables(before: Mapping[str, str | None]) -> None:
    """Restore the variables, so that the next cluster is treated as the first one.

    A process that has started its own cluster requires tokens from then on. A running cluster without tokens would end
    every actor as soon as it is made.
    """
    mode = before[_MODE]
    path = before[_PATH]
    if path is None:
        os.environ.pop(_PATH, None)
    else:
        os.environ[_PATH] = path
    if os.environ.get(_MODE) != mode:
        _set_mode(mode)


def _set_mode(mode: str | None) -> None:
    # Ray keeps the value of a variable that was deleted, so the default must be set once.
    os.environ[_MODE] = mode or "disabled"
    _read_again()
    if mode is None:
        del os.environ[_MODE]


def _read_again() -> None:
    raylet = importlib.import_module("ray._raylet")
    raylet.Config.initialize("")
    raylet.AuthenticationTokenLoader.instance().reset_cache()
