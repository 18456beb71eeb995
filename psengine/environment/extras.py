"""The packages of the extra ``server``, and what to say where one of them is missing."""

from __future__ import annotations

import importlib

from psengine.environment.installation import install_command
from psengine.errors import MissingExtraError

_SERVER_PACKAGES = ("zmq", "msgpack", "safetensors", "xxhash")


def require_server_packages(what: str, *more: str) -> None:
    """Raise unless the packages that servers and their clients need, and ``more``, can be imported.

    Args:
        what: needs them, in the plural: the subject of the message.
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
    """Return the error to raise where ``error`` kept a package of ``extra`` from being imported that ``what`` (plural)
    need.
    """
    return MissingExtraError(
        f"{what} need {error.name or 'a package'} (expected it installed, got: {error}). Fix: {install_command(extra)}"
    )
