"""The packages of the extra ``server``, and the error if one of them is missing."""

from __future__ import annotations

import importlib

from psengine.environment.installation import install_command
from psengine.errors import MissingExtraError

_SERVER_PACKAGES = ("zmq", "msgpack", "safetensors", "xxhash")


def require_server_packages(what: str, *more: str) -> None:
    """Raise unless the packages that servers and their clients need, and ``more``, can be imported.

    Args:
        what: the subject of the message, in the plural: needs the packages.
        more: names of further modules.

    Raises:
        MissingExtraError: names the first that is missing.
    """
    for name in (*_SERVER_PACKAGES, *more):
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise missing_extra(what, error) from error


def missing_extra(what: str, error: ImportError, *, extra: str = "server") -> MissingExtraError:
    """Return the error to raise after ``error``: ``what`` (plural) need a package of ``extra``."""
    return MissingExtraError(
        f"{what} need {error.name or 'a package'} (expected it installed, got: {error}). Fix: {install_command(extra)}"
    )
