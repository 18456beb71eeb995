"""The commands ``psengine`` and ``psengine-server``: launch, watch, debug and check training.

One module per command. May import everything below; nothing imports it.
"""

import os

import psengine
from psengine.environment.installation import BUILD_COMMAND, OTHER_DISTRIBUTION

# Both distributions have a psengine/__init__.py, and the one that was installed last has overwritten the other's. This
# module is ours alone, so it can still tell.
if not hasattr(psengine, "torch_backend"):
    raise ImportError(
        f"Another project's package psengine lies over this one (expected {psengine.__file__} to be ours)."
        f" Fix: pip uninstall --yes {OTHER_DISTRIBUTION}, then {BUILD_COMMAND}"
    )


def other_copy(directory: str) -> str:
    """What to say of a second psengine in ``directory``, where programs look first; "" if it has none."""
    own, other = os.path.realpath(psengine.__path__[0]), os.path.join(os.path.realpath(directory), "psengine")
    if other == own or not os.path.exists(os.path.join(other, "__init__.py")):
        return ""
    if psengine._lacks_extension(other):
        return f"psengine is imported from {own}, because {other} has no native extension"
    return (
        f"there are two psengines: this command's is {own}, and programs in {os.path.dirname(other)} import {other}."
        " Fix: pip install -e . in that folder, or run outside of it"
    )
