"""Imports of optional packages, with one clear error if a package is missing, broken or too old."""

from __future__ import annotations

import importlib
import random
from types import ModuleType

from runner.concurrency.user_code import describe_error
from runner.errors import BadEnvironment
from runner.version import installed_version

__all__ = ["optional_package"]


def optional_package(
    module: str, *, extra: str, package: str | None = None, least: str = "0", then: str = ""
) -> ModuleType:
    """Import a module of an optional package.

    The state of Python's global random numbers is restored afterwards, because some packages seed them at import.

    Args:
        module: the module's name.
        extra: the extra of deltarunner that installs the package.
        package: the name of the distribution; by default the module's name up to the first dot.
        least: the oldest version that works.
        then: arguments of a second `pip install`, for a package whose requirements conflict with deltarunner's.

    Raises:
        BadEnvironment: the package is missing or too old, or its import fails; the message names the command that
            installs it.
    """
    package = package or module.partition(".")[0]
    command = f"pip install 'deltarunner[{extra}]'" + (f" && pip install {then}" if then else "")
    version = installed_version(package)
    if version is not None and _numbers(version) < _numbers(least):
        raise BadEnvironment(f"{package} {version} is installed, and {least} or newer is needed: {command}")
    state = random.getstate()
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is not None and module.split(".")[0] == error.name.split(".")[0]:
            raise BadEnvironment(f"the package {package} is not installed: {command}") from None
        raise BadEnvironment(f"the package {package} needs {error.name}, which is not installed: {command}") from error
    except (Exception, SystemExit) as error:
        raise BadEnvironment(f"the package {package} fails at import ({describe_error(error)}): {command}") from error
    finally:
        random.setstate(state)


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: "1.26.0rc1" is (1, 26, 0)."""
    numbers = []
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)
