"""Former names of documented modules that have moved; they work for one version, with a warning."""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# A name stands for its submodules, too.
MOVED = {
    "psengine.client": "psengine.parameter_server.client",
    "psengine.comparison": "psengine.verify",
    "psengine.ops": "psengine.kernels.ops",
    "psengine.parallel": "psengine.wrapper.ddp",
    "psengine.timeline_files": "psengine.tracing.files",
}


def _new_name(name: str) -> str | None:
    for former, new in MOVED.items():
        if name == former or name.startswith(f"{former}."):
            return new + name[len(former) :]
    return None


def load(name: str) -> ModuleType:
    """Return the module that had this name, and warn the caller's caller."""
    new = _new_name(name)
    assert new is not None
    warnings.warn(f"{name} is now {new}; the former name goes with the next version", DeprecationWarning, stacklevel=3)
    return importlib.import_module(new)


class _FormerNames(MetaPathFinder, Loader):
    """Imports a module by its former name: the same object as under its new name."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return a spec for a former name; None leaves other names to the next finder."""
        return None if _new_name(fullname) is None else ModuleSpec(fullname, self)

    def exec_module(self, module: ModuleType) -> None:
        """Replace the empty module by the one that has moved."""
        sys.modules[module.__name__] = load(module.__name__)


def install() -> None:
    """Insert the finder before the others, which would load a package's modules a second time."""
    sys.meta_path.insert(0, _FormerNames())
