"""psengine: data-parallel training for PyTorch in which how replicas agree is one argument."""

from psengine.collectives.base import Collective
from psengine.environment import Context, init, is_main_process, shutdown
from psengine.errors import (
    ArgumentTypeError,
    CollectiveError,
    ConfigurationError,
    EnvironmentVariableError,
    ModuleError,
    PeerLostError,
    PSEngineError,
    ReductionError,
    ReplicaMismatchError,
)
from psengine.optimizer import DistributedOptimizer
from psengine.parallel import DistributedDataParallel
from psengine.strategies.base import Strategy
from psengine.strategies.sync_all_reduce import SyncAllReduce

__version__ = "0.1.0"

__all__ = [
    "ArgumentTypeError",
    "Collective",
    "CollectiveError",
    "ConfigurationError",
    "Context",
    "DistributedDataParallel",
    "DistributedOptimizer",
    "EnvironmentVariableError",
    "ModuleError",
    "PSEngineError",
    "PeerLostError",
    "ReductionError",
    "ReplicaMismatchError",
    "Strategy",
    "SyncAllReduce",
    "init",
    "is_main_process",
    "shutdown",
]
