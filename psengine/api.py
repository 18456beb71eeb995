"""The public names of psengine: ``psengine.X`` is the X of this module, loaded when the first one is used."""

from psengine.codecs.base import Codec
from psengine.codecs.registry import register_codec
from psengine.collectives.base import Collective
from psengine.collectives.registry import register_collective
from psengine.data.coordination import barrier, broadcast_object, print, stop_if_not_finite
from psengine.data.metrics import gather, mean, sum
from psengine.data.samplers import EvaluationSampler, ProportionalSampler
from psengine.data.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm
from psengine.environment.context import Context, ask_for_number, init, is_main_process, shutdown
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
from psengine.parameter_server.client.client import Client, connect
from psengine.parameter_server.client.identity import reserve_worker
from psengine.strategies.base import Strategy
from psengine.strategies.local.diloco_server import DilocoServer
from psengine.strategies.local.local_steps import Diloco, LocalSteps
from psengine.strategies.registry import register_strategy
from psengine.strategies.servers.asynchronous import AsyncServer
from psengine.strategies.servers.sync import SyncServer
from psengine.strategies.sharding.sync import SyncShardedOptimizer
from psengine.strategies.statistics import Statistics
from psengine.strategies.sync_all_reduce import SyncAllReduce
from psengine.tracing.timeline import timeline
from psengine.wrapper.ddp import DistributedDataParallel
from psengine.wrapper.optimizer import DistributedOptimizer

ask_for_number(reserve_worker)

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
    "Diloco",
    "DilocoServer",
    "DistributedDataParallel",
    "DistributedOptimizer",
    "EnvironmentVariableError",
    "EvaluationSampler",
    "FencedError",
    "LocalSteps",
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
    "SyncShardedOptimizer",
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
