"""What is done once a module has been imported, whoever imports it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def after_import(name: str, action: Callable[[Any], None]) -> None:
    """Call ``action`` with the module ``name``: now if it has been imported, else right after its import.

    Whoever imports the module sees what ``action`` did to it. A second call with the same arguments changes nothing.
    """
    if name in sys.modules:
        # Waits for the end of its import, where another thread has begun it.
        action(importlib.import_module(name))
    elif (finder := _AfterImport(name, action)) not in sys.meta_path:
        sys.meta_path.insert(0, finder)


@dataclass(frozen=True)
class _AfterImport(MetaPathFinder):
    """Runs the action after the module; finds no module itself."""

    name: str
    action: Callable[[Any], None]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's own spec, whose loader runs the action after it has run the module."""
        spec = PathFinder.find_spec(fullname, path, target) if fullname == self.name else None
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_act(module: ModuleType) -> None:
            run(module)
            self.action(module)

        spec.loader.exec_module = run_and_act  # type: ignore[method-assign]
        return spec
