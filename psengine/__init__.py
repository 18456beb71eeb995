"""psengine: data-parallel training for PyTorch in which how replicas agree is one argument."""

from typing import TYPE_CHECKING, Any

from psengine.collectives import torch_backend
from psengine.collectives.base import Collective
from psengine.environment import Context, init, is_main_process, shutdown
from psengine.errors import (
    ArgumentTypeError,
    AuthenticationError,
    CollectiveError,
    CommunicationHookError,
    ConfigurationError,
    EnvironmentVariableError,
    FencedError,
    MissingExtraError,
    ModuleError,
    NonFiniteGradientError,
    PeerLostError,
    ProtocolError,
    PSEngineError,
    ReductionError,
    ReplicaMismatchError,
    ServerError,
    ServerLostError,
    ServerRefusedError,
    SharedMemoryUnavailableError,
    SnapshotError,
)
from psengine.gradient_norms import clip_grad_norm_
from psengine.metrics import gather, mean, sum
from psengine.optimizer import DistributedOptimizer
from psengine.parallel import DistributedDataParallel
from psengine.samplers import EvaluationSampler, ProportionalSampler
from psengine.strategies.async_server import AsyncServer
from psengine.strategies.base import Strategy
from psengine.strategies.sync_all_reduce import SyncAllReduce
from psengine.strategies.sync_server import SyncServer
from psengine.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm
from psengine.timeline import timeline

if TYPE_CHECKING:
    from psengine.client.client import Client, connect

__version__ = "0.1.0"

torch_backend.register()

__all__ = [
    "ArgumentTypeError",
    "AsyncServer",
    "AuthenticationError",
    "Client",
    "Collective",
    "CollectiveError",
    "CommunicationHookError",
    "ConfigurationError",
    "Context",
    "DistributedDataParallel",
    "DistributedOptimizer",
    "EnvironmentVariableError",
    "EvaluationSampler",
    "FencedError",
    "MissingExtraError",
    "ModuleError",
    "NonFiniteGradientError",
    "PSEngineError",
    "PeerLostError",
    "ProportionalSampler",
    "ProtocolError",
    "ReductionError",
    "ReplicaMismatchError",
    "ServerError",
    "ServerLostError",
    "ServerRefusedError",
    "SharedMemoryUnavailableError",
    "SnapshotError",
    "Strategy",
    "SyncAllReduce",
    "SyncBatchNorm",
    "SyncServer",
    "clip_grad_norm_",
    "connect",
    "convert_sync_batchnorm",
    "gather",
    "init",
    "is_main_process",
    "mean",
    "shutdown",
    "sum",
    "timeline",
]


def __getattr__(name: str) -> Any:
    """``connect`` and ``Client`` need the packages of the extra ``server``; everything else needs torch alone."""
    if name in ("Client", "connect"):
        from psengine.extras import require_server_packages

        require_server_packages("clients of parameter servers")
        from psengine.client import client

        return getattr(client, name)
    raise AttributeError(f"module 'psengine' has no attribute {name!r}")
