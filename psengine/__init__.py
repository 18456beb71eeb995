"""psengine: data-parallel training for PyTorch in which one argument selects how replicas synchronise.

The public names are those of ``psengine.api``. They are loaded, and torch with them, when the first one is used: a
command that only shows its help, or asks a server for its status, does not wait for torch.
"""

import importlib
import logging
import os
import sys
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING


def _lacks_extension(package: str) -> bool:
    """Whether ``package`` is a source tree's, where the native extension was not built."""
    is_source = os.path.isdir(os.path.join(os.path.dirname(package), "csrc"))
    return is_source and not any(name.startswith("_native.") for name in os.listdir(package))


# After ``pip install .`` a program in the same folder finds the sources first. It goes on with what was installed.
_found_first = os.path.dirname(os.path.abspath(__file__))
_taken = _found_first
if _lacks_extension(_found_first):
    _others = [entry for entry in sys.path if os.path.abspath(entry) != os.path.dirname(_found_first)]
    _other = PathFinder.find_spec("psengine", _others)
    # The other project's package of this name has none of our folders.
    if _other and _other.origin and os.path.isdir(os.path.join(os.path.dirname(_other.origin), "kernels")):
        __file__, _taken = _other.origin, os.path.dirname(_other.origin)
        __path__[:] = [_taken]

from psengine.collectives.torch_backend import backend as torch_backend  # noqa: E402
from psengine.environment.variables import RUN_ID, read_variable  # noqa: E402
from psengine.version import __version__ as __version__  # noqa: E402

if TYPE_CHECKING:
    from psengine.api import *  # noqa: F403 - __all__ is there

if _taken != _found_first and not read_variable(RUN_ID):  # psengine run says it for its workers
    logging.getLogger(__name__).warning(
        "psengine is imported from %s, because %s has no native extension. Fix: run outside of that folder; to use its"
        " code, pip install -e . there",
        *(_taken, _found_first),
    )
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
