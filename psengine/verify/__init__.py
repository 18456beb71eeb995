"""Compare a training under native DDP with one under psengine, step by step.

``compare`` trains a user's target, ``compare_zoo`` the built-in models; ``psengine verify`` is their command.
May import the public names, ``wrapper`` and all that comes after it.
"""

from psengine.verify.differences import Difference
from psengine.verify.experiment import compare, compare_zoo
from psengine.verify.ranks import RankFailedError
from psengine.verify.settings import Settings
from psengine.verify.target import Target, TargetError
from psengine.verify.verdict import Comparison, Control

__all__ = [
    "Comparison",
    "Control",
    "Difference",
    "RankFailedError",
    "Settings",
    "Target",
    "TargetError",
    "compare",
    "compare_zoo",
]
