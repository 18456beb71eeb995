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
from psengine.metrics import gather, mean, sum
from psengine.optimizer import DistributedOptimizer
from psengine.parallel import DistributedDataParallel
from psengine.strategies.base import Strategy
from psengine.strategies.sync_all_reduce import SyncAllReduce
from psengine.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm

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
    "SyncBatchNorm",
    "convert_sync_batchnorm",
    "gather",
    "init",
    "is_main_process",
    "mean",
    "shutdown",
    "sum",
]
