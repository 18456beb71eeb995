"""Compare a training of the user's model under two strategies, or one and native DDP, step by step.

``psengine verify`` is the command of ``compare``. May import the public names, ``wrapper`` and all that comes after it.
"""

from psengine.verify.comparison import Comparison, Settings, Target, TargetError, compare
from psengine.verify.differences import Difference
from psengine.verify.ranks import RankFailedError

__all__ = ["Comparison", "Difference", "RankFailedError", "Settings", "Target", "TargetError", "compare"]
