"""The versions of installed distributions, including deltarunner's own."""

import functools
from importlib.metadata import PackageNotFoundError, version

__all__ = ["__version__", "installed_version"]

__version__ = version("deltarunner")


@functools.cache  # cached, since reading a distribution's metadata takes milliseconds
def installed_version(distribution: str) -> str | None:
    """The version of a distribution; None if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
