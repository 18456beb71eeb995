"""psengine: data-parallel training for PyTorch in which one argument selects how replicas synchronise.

The public names are those of ``psengine.api``. They are loaded, and torch with them, when the first one is used: a
command that only shows its help, or asks a server for its status, does not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING

from psengine.collectives.torch_backend import backend as torch_backend
from psengine.version import __version__ as __version__

if TYPE_CHECKING:
    from psengine.api import *  # noqa: F403 - __all__ is there

torch_backend.register()

# Hidden from type checkers, which would take any name for one of ours.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Return a public name, or a folder of the package, which loading the public names imports."""
        # Python asks modules for names such as __path__, and an import for that of a module that it has not loaded yet.
        if not name.startswith("_") or name == "__all__":
            api = importlib.import_module("psengine.api")
            if name == "__all__" or name in api.__all__:
                globals()[name] = getattr(api, name)
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module 'psengine' has no attribute {name!r}")

    def __dir__() -> list[str]:
        """What ``dir(psengine)`` and completion show."""
        return sorted({*globals(), *importlib.import_module("psengine.api").__all__})
