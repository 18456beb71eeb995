"""A training under native DDP and under psengine, step by step: the first difference, the largest, a verdict.

``compare`` takes a target of the user's, ``compare_zoo`` the built-in models, ``Settings`` says how; ``psengine
verify`` is their command.
"""

from psengine.comparison.differences import Difference
from psengine.comparison.experiment import compare, compare_zoo
from psengine.comparison.launch import RankFailedError
from psengine.comparison.settings import Settings
from psengine.comparison.target import Target, TargetError
from psengine.comparison.verdict import Comparison, Control

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
