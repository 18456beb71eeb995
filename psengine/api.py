"""The public names of psengine: ``psengine.X`` is the X of this module, loaded when the first one is used."""

from psengine import errors
from psengine.codecs.base import Codec, CodecState, PayloadSpec
from psengine.codecs.registry import register_codec
from psengine.collectives.base import Collective, DeferredWork, Intermediate, Work
from psengine.collectives.forwarding import Forwarding
from psengine.collectives.registry import register_collective
from psengine.data.coordination import barrier, broadcast_object, print, stop_if_not_finite
from psengine.data.elastic import ElasticLoader
from psengine.data.metrics import gather, mean, sum
from psengine.data.samplers import EvaluationSampler, ProportionalSampler
from psengine.data.sync_batch_norm import SyncBatchNorm, convert_sync_batchnorm
from psengine.environment.context import Context, ask_for_number, init, is_main_process, shutdown
from psengine.errors import *  # noqa: F403 - __all__ is there
from psengine.parameter_server.client.client import Client, connect
from psengine.parameter_server.client.identity import reserve_worker
from psengine.strategies.base import Capabilities, Strategy
from psengine.strategies.exchange import Step
from psengine.strategies.local.diloco_server import DilocoServer
from psengine.strategies.local.rounds import Diloco, LocalSteps
from psengine.strategies.registry import register_strategy
from psengine.strategies.servers.asynchronous import AsyncServer
from psengine.strategies.servers.sync import SyncServer
from psengine.strategies.sharding import SyncShardedOptimizer
from psengine.strategies.statistics import Statistics
from psengine.strategies.sync_all_reduce import SyncAllReduce
from psengine.tables import ServerEmbedding, ServerEmbeddingBag
from psengine.tensors.share import Share
from psengine.tracing.timeline import timeline
from psengine.wrapper.ddp import DistributedDataParallel
from psengine.wrapper.optimizer import DistributedOptimizer

ask_for_number(reserve_worker)

__all__ = [
    "AsyncServer",
    "Capabilities",
    "Client",
    "Codec",
    "CodecState",
    "Collective",
    "Context",
    "DeferredWork",
    "Diloco",
    "DilocoServer",
    "DistributedDataParallel",
    "DistributedOptimizer",
    "ElasticLoader",
    "EvaluationSampler",
    "Forwarding",
    "Intermediate",
    "LocalSteps",
    "PayloadSpec",
    "ProportionalSampler",
    "ServerEmbedding",
    "ServerEmbeddingBag",
    "Share",
    "Statistics",
    "Step",
    "Strategy",
    "SyncAllReduce",
    "SyncBatchNorm",
    "SyncServer",
    "SyncShardedOptimizer",
    "Work",
    "barrier",
    "broadcast_object",
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
__all__ += errors.__all__
