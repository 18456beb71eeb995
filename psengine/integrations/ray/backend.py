"""What Ray Train does with its workers before they train, and after.

Strategies whose workers step have a process group: Ray makes it as for native DDP, and ``psengine.init()`` adopts it. A
worker that dies ends the others, and Ray starts all of them again, from its latest checkpoint.

Strategies whose servers step have independent workers and no process group. Ray starts a dead worker again alone, and
it goes on with the servers' weights.
"""

from __future__ import annotations

import gc
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import ray.train
from ray.train.backend import Backend
from ray.train.torch import TorchConfig
from ray.train.torch.config import TorchConfigContextManager, _TorchBackend
from ray.train.v2._internal.execution.worker_group import ExecutionGroup, WorkerGroup

from psengine.environment.variables import default_strategy, read_variable, set_variables
from psengine.errors import ConfigurationError
from psengine.integrations.ray.reporting import let_worker_0_report_alone, refuse_reports_of_others
from psengine.integrations.ray.servers import Servers, file_in_memory
from psengine.specification import Specification
from psengine.strategies.registry import resolve_strategy

# What the actor sets, and what would open the server to others.
_OURS = ("bind", "snapshot_dir", "secret_file", "curve_key", "allow", "insecure", "log_format")


class PSEngineConfig(TorchConfig):  # type: ignore[misc]
    """Workers of Ray's ``TorchTrainer`` under a strategy of psengine.

    Args:
        strategy: how replicas agree, unless the training function names a strategy: text as for
            ``psengine.DistributedDataParallel``; default PSENGINE_STRATEGY, else "sync".
        servers: number of parameter servers, actors in the workers' placement group. Default: 1 if the strategy needs
            servers and names none.
        server_options: more settings of ``psengine-server``, such as ``{"shards": 2, "lease_s": 10}``.
        snapshot_dir: folder that all nodes share. Servers that hold the weights go on from the snapshots there, also
            in a later run. Default: a folder on the server's node, which ends with the group of workers.
        options: of ``ray.train.torch.TorchConfig``: ``backend``, ``timeout_s``, ``init_method``.

    Raises:
        ConfigurationError: unknown strategy or option, or two of them contradict each other.
    """

    def __init__(
        self,
        strategy: str | None = None,
        *,
        servers: int | None = None,
        server_options: Mapping[str, Any] | None = None,
        snapshot_dir: str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if strategy is not None and not isinstance(strategy, str):
            raise ConfigurationError(
                f"strategy travels to other processes as text (expected a name such as"
                f" 'async:staleness_scaling=inverse', got {strategy!r}). Fix: pass the object to"
                " psengine.DistributedDataParallel in the training function."
            )
        self.strategy = strategy or default_strategy()
        made = resolve_strategy(self.strategy)
        uses_servers = not made.capabilities.needs_process_group
        self.keeps_weights = not made.capabilities.workers_step
        """Whether servers hold the weights, so that workers are independent."""
        self.addresses = read_variable("PSENGINE_SERVERS") or ""
        named = self.addresses or Specification.parse("strategy", self.strategy).options.get("servers")
        self.servers = int(uses_servers and not named) if servers is None else servers
        self.server_options = dict(server_options or {})
        self.snapshot_dir = snapshot_dir
        self.secret = secrets.token_urlsafe(32)
        self._check(uses_servers, named)

    def _check(self, uses_servers: bool, named: Any) -> None:
        is_count = isinstance(self.servers, int) and not isinstance(self.servers, bool) and self.servers >= 0
        if not is_count:
            raise ConfigurationError(f"servers is a number of servers (expected 0 or more, got {self.servers!r})")
        if self.servers and not uses_servers:
            raise ConfigurationError(
                f"strategy {self.strategy!r} uses no servers (expected servers=None, got {self.servers}). Fix: leave"
                " servers out, or use strategy 'async' or 'sync-server'."
            )
        if self.servers and named:
            raise ConfigurationError(
                f"servers starts servers of this run's own (expected no others, got servers={self.servers} and"
                f" {named}). Fix: leave one of them out."
            )
        if uses_servers and not self.servers and not named:
            raise ConfigurationError(
                f"strategy {self.strategy!r} needs a server (expected servers of 1 or more, or PSENGINE_SERVERS; got"
                " servers=0)."
            )
        if not self.servers and (self.server_options or self.snapshot_dir):
            raise ConfigurationError(
                f"server_options and snapshot_dir are for servers that this run starts (expected servers of 1 or more,"
                f" got {self.servers})."
            )
        if self.snapshot_dir and not self.keeps_weights:
            raise ConfigurationError(
                f"under strategy {self.strategy!r} the workers hold the weights (expected snapshot_dir=None, got"
                f" {self.snapshot_dir!r}). Fix: keep them in Ray's checkpoints."
            )
        if self.servers:
            self.server_options = _checked_options(self.server_options)

    @property
    def backend_cls(self) -> type[Backend]:
        """What Ray Train calls when workers start and end."""
        return IndependentWorkers if self.keeps_weights else GroupOfWorkers

    @property
    def train_func_context(self) -> Callable[[], Any]:
        """What Ray Train enters around the training function."""
        return _training


def _checked_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of servers, as ``ServerSettings`` takes them."""
    from psengine.parameter_server.server.settings import ServerSettings, make_settings

    known = [name for name in ServerSettings.model_fields if name not in _OURS]
    unknown = [name for name in options if name not in known]
    if unknown:
        raise ConfigurationError(
            "server_options are settings of psengine-server that Ray's actors do not set themselves (expected of"
            f" {', '.join(known)}; got {', '.join(unknown)})."
        )
    make_settings(options, dict.fromkeys(options, "server_options"))
    return dict(options)


class _WithServers:
    """What both backends share: the servers of the group of workers, and the workers' variables."""

    _servers: Servers | None = None

    def _connect(self, group: ExecutionGroup, config: PSEngineConfig) -> None:
        """Start the servers, with the whole group of workers, and tell the workers where they are."""
        if config.servers and isinstance(group, WorkerGroup):
            self._end_servers()
            self._servers = Servers(
                config.servers,
                group.get_worker_group_state().placement_group_handle.placement_group,
                config.secret,
                config.server_options,
                config.snapshot_dir,
                config.keeps_weights,
            )
        variables = {"PSENGINE_STRATEGY": config.strategy}
        try:
            addresses = config.addresses if self._servers is None else ",".join(self._servers.addresses())
            if addresses:
                variables["PSENGINE_SERVERS"] = addresses
            group.execute(_enter, variables, config.secret if config.servers else "", config.keeps_weights)
        except BaseException:
            self._disconnect(group)
            raise

    def _disconnect(self, group: ExecutionGroup) -> None:
        if isinstance(group, WorkerGroup):  # and not one worker, which is started again
            self._end_servers()

    def _end_servers(self) -> None:
        servers, self._servers = self._servers, None
        if servers is not None:
            servers.end()


class GroupOfWorkers(_WithServers, _TorchBackend):  # type: ignore[misc]
    """The workers are the ranks of Ray's process group."""

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Make the process group, and the servers."""
        super().on_start(worker_group, backend_config)
        self._connect(worker_group, backend_config)

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """End both."""
        try:
            super().on_shutdown(worker_group, backend_config)
        finally:
            self._disconnect(worker_group)


class IndependentWorkers(_WithServers, Backend):  # type: ignore[misc]
    """Each worker is a world of its own, which Ray starts again alone."""

    has_replica_groups = True

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Start the servers with the first workers."""
        self._connect(worker_group, backend_config)
        if isinstance(worker_group, WorkerGroup):
            let_worker_0_report_alone(worker_group)

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """End the servers with the last workers."""
        self._disconnect(worker_group)


def _enter(variables: dict[str, str], secret: str, is_independent: bool) -> None:
    """Tell this worker's process what a launcher would."""
    if secret:
        variables["PSENGINE_SECRET_FILE"] = file_in_memory(secret)
    if is_independent:
        context = ray.train.get_context()
        variables["PSENGINE_WORKER"] = str(context.get_world_rank())
        variables["PSENGINE_WORKERS"] = str(context.get_world_size())
        refuse_reports_of_others()
    set_variables(variables)


@contextmanager
def _training() -> Iterator[None]:
    with TorchConfigContextManager():
        yield
    # Ray keeps the process until all workers are done, and nobody is to wait for this one: models that the training
    # function left behind leave the servers when they are collected.
    gc.collect()
