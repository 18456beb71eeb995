"""The commands ``psengine`` and ``psengine-server``: launch, watch, debug and check training.

One module per command. May import everything below; nothing imports it.
"""

import psengine
from psengine.environment.installation import BUILD_COMMAND, OTHER_DISTRIBUTION

# Both distributions have a psengine/__init__.py, and the one that was installed last has overwritten the other's. This
# module is ours alone, so it can still tell.
if not hasattr(psengine, "torch_backend"):
    raise ImportError(
        f"Another project's package psengine lies over this one (expected {psengine.__file__} to be ours)."
        f" Fix: pip uninstall --yes {OTHER_DISTRIBUTION}, then {BUILD_COMMAND}"
    )
