"""Ray Train over psengine: a ``torch_config`` for Ray's ``TorchTrainer``.

    trainer = TorchTrainer(train, torch_config=PSEngineConfig("async"), scaling_config=ScalingConfig(num_workers=4))
    trainer.fit()

Strategies whose workers step have a process group: Ray makes it as for native DDP, and ``psengine.init()`` adopts it. A
worker that dies ends the others, and Ray starts all of them again, from its latest checkpoint.

Strategies whose servers step have independent workers and no process group. Ray starts a dead worker again alone, and
it goes on with the servers' weights.

The servers are actors in the workers' placement group. Each server is a thread of its actor's process, so that it ends
whenever the actor does. Ray starts a dead actor again with the same arguments; the actor then takes its former port and
its newest snapshot.
"""

from __future__ import annotations

import gc
import logging
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from psengine.environment.installation import missing_extra
from psengine.environment.variables import default_strategy, read_variable, set_variables
from psengine.errors import ConfigurationError, ServerError
from psengine.parameter_server.server.daemon import Server
from psengine.parameter_server.server.settings import ServerSettings, make_settings
from psengine.specification import Specification
from psengine.strategies.registry import resolve_strategy
from psengine.tracing.logging_format import TextFormatter

try:
    import ray.train
    from ray._private.worker import _global_node
    from ray.train import Checkpoint
    from ray.train.backend import Backend
    from ray.train.torch import TorchConfig
    from ray.train.torch.config import TorchConfigContextManager, _TorchBackend
    from ray.train.v2._internal.execution.callback import TrainContextCallback
    from ray.train.v2._internal.execution.checkpoint.report_handler import ReportCallbackHandler
    from ray.train.v2._internal.execution.context import get_train_context
    from ray.train.v2._internal.execution.worker_group import ExecutionGroup, WorkerGroup
    from ray.util.placement_group import PlacementGroup
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError as error:
    raise missing_extra("psengine's workers and servers under Ray", error, "ray") from error

__all__ = ["PSEngineConfig", "report"]

logger = logging.getLogger(__name__)

START_S = END_S = 60.0
# As `psengine run`: how much a crash of a server may lose.
SNAPSHOT_INTERVAL_S = 15.0
# What the actor sets, and what would open the server to others.
_OURS = ("bind", "snapshot_dir", "secret_file", "curve_key", "allow", "insecure", "log_format")


class PSEngineConfig(TorchConfig):  # type: ignore[misc]
    """Workers of Ray's ``TorchTrainer`` under a strategy of psengine.

    Args:
        strategy: how replicas synchronise, unless the training function names a strategy: text as for
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
        self.strategy = strategy or default_strategy()
        specification = Specification.parse("strategy", self.strategy)
        capabilities = resolve_strategy(self.strategy).capabilities
        uses_servers = not capabilities.needs_process_group
        self.keeps_weights = not capabilities.workers_step
        """Whether servers hold the weights, so that workers are independent."""
        self.addresses = read_variable("PSENGINE_SERVERS") or ""
        named = self.addresses or specification.options.get("servers")
        self.servers = int(uses_servers and not named) if servers is None else servers
        self.server_options = dict(server_options or {})
        self.snapshot_dir = snapshot_dir
        self.secret = secrets.token_urlsafe(32)
        if bool(self.servers) != bool(uses_servers and not named) or self.servers < 0:
            raise ConfigurationError(
                f"servers is how many to start for strategy {self.strategy!r} where none are named (expected"
                f" {int(uses_servers and not named)}, got servers={self.servers} and {named or 'none'} named)"
            )
        if not self.servers and (self.server_options or self.snapshot_dir):
            raise ConfigurationError(
                "server_options and snapshot_dir are for servers that this run starts (expected neither, got"
                f" {self.server_options} and {self.snapshot_dir})"
            )
        if self.snapshot_dir and not self.keeps_weights:
            raise ConfigurationError(
                f"under strategy {self.strategy!r} the workers hold the weights (expected snapshot_dir=None, got"
                f" {self.snapshot_dir!r}). Fix: keep them in Ray's checkpoints."
            )
        if ours := [name for name in self.server_options if name in _OURS]:
            raise ConfigurationError(f"Ray's actors set these settings themselves (expected others, got {ours})")
        make_settings(self.server_options)

    @property
    def backend_cls(self) -> type[Backend]:
        """What Ray Train calls when workers start and end."""
        return IndependentWorkers if self.keeps_weights else GroupOfWorkers

    @property
    def train_func_context(self) -> Callable[[], Any]:
        """What Ray Train enters around the training function."""
        return _training


def report(metrics: Mapping[str, Any], checkpoint: Checkpoint | None = None) -> None:
    """Report metrics and a checkpoint to Ray Train, under any strategy. Every worker calls it equally often.

    In a process group it is ``ray.train.report``, and all workers wait for each other. Of independent workers only
    worker 0 reports, and does not wait. In both cases the result has worker 0's metrics.

    Args:
        metrics: numbers and text by name.
        checkpoint: a folder that this worker wrote; under independent workers only worker 0's is kept.
    """
    if not read_variable("PSENGINE_WORKER") or ray.train.get_context().get_world_rank() == 0:
        ray.train.report(dict(metrics), checkpoint=checkpoint)


# ---- where Ray's controller runs -------------------------------------------------------------------------------------


class _WithServers:
    """What both backends share: the servers of the group of workers, and the workers' variables."""

    _servers: Servers | None = None

    def _connect(self, group: ExecutionGroup, config: PSEngineConfig) -> None:
        """Start the servers, with the whole group of workers, and tell the workers where they are."""
        if config.servers and isinstance(group, WorkerGroup):
            self._end_servers()
            placement = group.get_worker_group_state().placement_group_handle.placement_group
            self._servers = Servers(config, placement)
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
    """Each worker is a world of its own, which Ray starts again alone. Of their reports worker 0's alone counts."""

    has_replica_groups = True

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        """Start the servers with the first workers, and let Ray's reports be complete with worker 0's.

        Ray does the latter itself while a node is being preempted.
        """
        self._connect(worker_group, backend_config)
        if isinstance(worker_group, WorkerGroup):
            worker_group.set_required_barrier_ranks([0])
            for callback in worker_group._callbacks:
                if isinstance(callback, ReportCallbackHandler):
                    callback.set_required_ranks([0])

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        """End the servers with the last workers."""
        self._disconnect(worker_group)


class Servers:
    """The servers of one group of workers, beside them in their placement group, spread evenly over its bundles.

    They take no resources of their own. What is left in the placement group ends with it.
    """

    def __init__(self, config: PSEngineConfig, placement: PlacementGroup) -> None:
        run, bundles = secrets.token_hex(4), len(placement.bundle_specs)
        actor = ray.remote(ServerActor)
        self._actors = [
            actor.options(
                name=f"psengine-server-{run}-{index}",
                num_cpus=0,
                max_restarts=-1,
                max_task_retries=-1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    placement_group=placement, placement_group_bundle_index=index * bundles // config.servers % bundles
                ),
            ).remote(index, run, config)
            for index in range(config.servers)
        ]

    def addresses(self) -> list[str]:
        """Where the servers listen now, after those that died are back.

        Raises:
            ServerError: one does not start, or not in time.
        """
        try:
            return list(ray.get([actor.address.remote() for actor in self._actors], timeout=2 * START_S))
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            raise ServerError(f"a parameter server did not start within {2 * START_S:g} s: {error}") from error

    def end(self) -> None:
        """End all, in order where they answer."""
        actors, self._actors = self._actors, []
        ray.wait([actor.end.remote() for actor in actors], num_returns=len(actors), timeout=END_S)
        for actor in actors:
            ray.kill(actor)


class ServerActor:
    """One server; Ray makes it on the node of its bundle.

    Args:
        index: of this server.
        run: of this group of workers; part of the name of a folder in the node's folder of Ray's session.
        config: has the secret, the settings, and where snapshots are kept, if there is anything to snapshot.
    """

    def __init__(self, index: int, run: str, config: PSEngineConfig) -> None:
        _log_to_stderr()
        self._folder = Path(_global_node.get_session_dir_path()) / f"psengine-{run}-{index}"
        self._folder.mkdir(mode=0o700, exist_ok=True)
        settings: dict[str, Any] = {"snapshot_interval_s": SNAPSHOT_INTERVAL_S, **config.server_options}
        if config.keeps_weights:
            settings["snapshot_dir"] = Path(config.snapshot_dir or self._folder) / f"server-{index}"
            settings["snapshot_dir"].mkdir(parents=True, exist_ok=True)
        host, port = ray.util.get_node_ip_address(), self._folder / "port"
        bind = f"tcp://{f'[{host}]' if ':' in host else host}:{port.read_text() if port.exists() else '0'}"
        self._address = ""
        self._is_ending = False
        self._is_decided = threading.Event()
        self._server = Server(ServerSettings(bind=bind, secret_file=_file_in_memory(config.secret), **settings))
        self._thread = threading.Thread(target=self._serve, name="psengine-server", daemon=True)
        self._thread.start()
        self._is_decided.wait(START_S)
        if not self._address:
            raise ServerError(
                f"parameter server {index} on {host} was not ready within {START_S:g} s; its log says why"
            )
        port.write_text(self._address.rpartition(":")[2])

    def address(self) -> str:
        """Where clients connect."""
        return self._address

    def end(self) -> None:
        """End in order, with a last snapshot; remove what only this group of workers needed."""
        self._is_ending = True
        self._server.end("the group of workers ends")
        self._thread.join(END_S)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _serve(self) -> None:
        code = self._server.run(self._announce)
        was_ready = bool(self._address)
        self._is_decided.set()
        if was_ready and not self._is_ending:
            # Of its own accord: Ray starts the actor again.
            logger.critical("the server ended with exit code %d", code)
            os._exit(code or 1)

    def _announce(self, line: str) -> None:
        logger.info("%s", line)
        if line.startswith("psengine-server ready "):
            self._address = line.split()[2]
            self._is_decided.set()


def _log_to_stderr() -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(TextFormatter())
    ours = logging.getLogger("psengine")
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    ours.propagate = False


# ---- in a worker -----------------------------------------------------------------------------------------------------


def _enter(variables: dict[str, str], secret: str, is_independent: bool) -> None:
    """Tell this worker's process what a launcher would."""
    if secret:
        variables["PSENGINE_SECRET_FILE"] = str(_file_in_memory(secret))
    if is_independent:
        context = ray.train.get_context()
        variables["PSENGINE_WORKER"] = str(context.get_world_rank())
        variables["PSENGINE_WORKERS"] = str(context.get_world_size())
        if context.get_world_rank() != 0:
            get_train_context().get_context_callbacks().append(_Refusal())
    set_variables(variables)


def _file_in_memory(text: str) -> Path:
    """Return the path of a file of mode 0600 with ``text``, which ends with this process and lies on no disk."""
    descriptor = os.memfd_create("psengine-secret")
    os.fchmod(descriptor, 0o600)
    os.write(descriptor, text.encode())
    return Path(f"/proc/{os.getpid()}/fd/{descriptor}")


class _Refusal(TrainContextCallback):  # type: ignore[misc]
    """Turns a report by a worker other than 0, which would wait for ever, into an error."""

    def on_report(self) -> AbstractContextManager[None]:
        raise ConfigurationError(
            "independent workers do not wait for each other in ray.train.report (expected a call in worker 0 alone, got"
            f" one in worker {ray.train.get_context().get_world_rank()}). Fix: psengine.integrations.ray.report."
        )


@contextmanager
def _training() -> Iterator[None]:
    with TorchConfigContextManager():
        yield
    # Ray keeps the process until all workers are done, and nobody is to wait for this one: models that the training
    # function left behind leave the servers when they are collected.
    gc.collect()
