"""psengine: data-parallel training for PyTorch in which how replicas agree is one argument."""

from typing import TYPE_CHECKING, Any

from psengine import former_names
from psengine.codecs.base import Codec
from psengine.codecs.registry import register_codec
from psengine.collectives.base import Collective
from psengine.collectives.registry import register_collective
from psengine.collectives.torch_backend import backend as torch_backend
from psengine.data.coordination import barrier, broadcast_object, print, stop_if_not_finite
from psengine.data.metrics import gather, mean, sum
from psengine.data.samplers import EvaluationSampler, ProportionalSampler
from psengine.data.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm
from psengine.environment.context import Context, init, is_main_process, shutdown
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
    NonFiniteLossError,
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
from psengine.gradients.norms import clip_grad_norm_
from psengine.strategies.base import Strategy
from psengine.strategies.registry import register_strategy
from psengine.strategies.servers.asynchronous import AsyncServer
from psengine.strategies.servers.sync import SyncServer
from psengine.strategies.statistics import Statistics
from psengine.strategies.sync_all_reduce import SyncAllReduce
from psengine.tracing.timeline import timeline
from psengine.version import __version__ as __version__
from psengine.wrapper.ddp import DistributedDataParallel
from psengine.wrapper.optimizer import DistributedOptimizer

if TYPE_CHECKING:
    from psengine.parameter_server.client.client import Client, connect

former_names.install()

torch_backend.register()

__all__ = [
    "ArgumentTypeError",
    "AsyncServer",
    "AuthenticationError",
    "Client",
    "Codec",
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
    "NonFiniteLossError",
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
    "Statistics",
    "Strategy",
    "SyncAllReduce",
    "SyncBatchNorm",
    "SyncServer",
    "barrier",
    "broadcast_object",
    "clip_grad_norm_",
    "connect",
    "convert_sync_batchnorm",
    "gather",
    "init",
    "is_main_process",
    "mean",
    "print",
    "register_codec",
    "register_collective",
    "register_strategy",
    "shutdown",
    "stop_if_not_finite",
    "sum",
    "timeline",
]


def __getattr__(name: str) -> Any:
    """``connect`` and ``Client`` need the packages of the extra ``server``; everything else needs torch alone."""
    if name in ("Client", "connect"):
        from psengine.environment.extras import require_server_packages

        require_server_packages("clients of parameter servers")
        from psengine.parameter_server.client import client

        return getattr(client, name)
    if f"psengine.{name}" in former_names.MOVED:
        return former_names.load(f"psengine.{name}")
    raise AttributeError(f"module 'psengine' has no attribute {name!r}")
