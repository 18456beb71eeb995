"""Modules of the user's that a server imports when it starts, for what they register: codecs."""

from __future__ import annotations

import importlib
from collections.abc import Iterable

from psengine.errors import ConfigurationError


def import_plugins(names: Iterable[str]) -> None:
    """Import the modules of these names.

    Raises:
        ConfigurationError: one cannot be imported.
    """
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigurationError(
                f"plugins names modules that the server can import (expected one called {name!r}, got {error}). Fix:"
                " put its directory into PYTHONPATH."
            ) from error
