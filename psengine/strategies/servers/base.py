"""The part that the strategies over parameter servers share.

prepare     find servers, say HELLO
lay_out     buckets become chunks
join        the first worker's values go to the servers; every other worker gets the servers'
close       say goodbye; stop the server that this process started
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypedDict

import torch
from msgspec import Meta
from typing_extensions import override

from psengine.codecs.base import Codec
from psengine.codecs.registry import resolve_codec
from psengine.environment.context import assign_worker
from psengine.errors import ConfigurationError, ProtocolError
from psengine.parameter_server.client.addresses import keys_from_environment, parse_addresses
from psengine.parameter_server.client.identity import ending_with_the_job, taking_reservation
from psengine.parameter_server.client.operation import wait_all
from psengine.parameter_server.client.options import SessionOptions
from psengine.parameter_server.client.worker_session import WorkerSession
from psengine.protocol.bodies import AnyRule, convert
from psengine.strategies.base import Capabilities, Strategy
from psengine.strategies.life_cycle import Replica
from psengine.strategies.servers.chunked_replica import ChunkedReplica
from psengine.strategies.servers.discovery import Rendezvous, leave, meet, name_of_job
from psengine.strategies.statistics import counts_at_servers
from psengine.tensors.bucket import Bucket

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 300.0
# How often a worker looks for what another one gives the servers.
LOOK_AGAIN_S = 0.1
# How long a change of strategies waits for the first answer of a server.
CHECK_TIMEOUT_S = 10.0


class _SessionsOptions(TypedDict, total=False):
    servers: str | Sequence[str] | None
    job: str | None
    timeout_s: Annotated[float, Meta(gt=0.0, lt=1e9)]


class ServerOptions(_SessionsOptions, total=False):
    """See ``ServerStrategy``."""

    compress: str | Codec | None
    durability: str | None


class ServerStrategy(Strategy):
    """A strategy over parameter servers.

    Args:
        servers: addresses, as a list or with commas; None takes ``PSENGINE_SERVERS``, else rank 0 starts a server on
            this host and stops it at the end.
        job: name under which workers find each other at the servers; None takes ``PSENGINE_JOB``, else "default",
            and numbers the models that one process wraps. A copy of a strategy (``deepcopy``, pickle) is numbered too.
        timeout_s: deadline of every wait for a server.
        compress: the codec, or its name, of gradients and of the servers' answers. All workers of a job use the same,
            and the servers know it. None: values travel as they are.
        durability: the least that the servers are to keep through their end: "memory", "snapshot" or "log" (every
            acknowledged update); servers that offer less refuse the job. None asks for nothing.
    """

    capabilities = Capabilities(
        needs_process_group=False,
        keeps_first_layout=True,
        carries_buffers=True,
        averages_gradients=False,
        counts_absent=True,
        exchange_name="push",
    )
    counts_usage = False

    def __init__(
        self,
        rule: dict[str, Any],
        /,
        *,
        servers: str | Sequence[str] | None = None,
        job: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        compress: str | Codec | None = None,
        durability: str | None = None,
    ) -> None:
        """Like the class; ``rule`` is how the servers treat pushes, as HELLO says it.

        Raises:
            ConfigurationError: an option that no session or no server would take.
        """
        self.rule = rule if durability is None else {**rule, "durability": durability}
        self._servers, self._job, self._timeout_s = servers, job, timeout_s
        self._codec = resolve_codec(compress)
        what = f"strategy {self.name!r}"
        try:
            convert({"servers": servers, "job": job, "timeout_s": timeout_s}, _SessionsOptions, what)
            convert(self.rule, AnyRule, what)
        except ProtocolError as error:
            raise ConfigurationError(f"{error}. Fix: give such a value, or leave the option out") from None
        parse_addresses(servers)
        self._is_copy = False
        # The rendezvous of a replica that was abandoned.
        self._abandoned: Rendezvous | None = None
        self._forget()

    def _forget(self) -> None:
        """Become a strategy that serves no replica."""
        self._replica: Replica | None = None
        self._session: WorkerSession | None = None
        self.rendezvous = None
        self._chunks: ChunkedReplica | None = None
        self._buckets: list[Bucket] = []
        self.completed_steps = 0

    @override
    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._is_copy = True

    @property
    @override
    def agreed_options(self) -> dict[str, str]:
        """The servers compare what workers have to choose alike."""
        return {"strategy": self.name}

    @property
    def session(self) -> WorkerSession:
        """The connection to the servers; set by ``prepare``."""
        _ = self.replica
        assert self._session is not None, "connected by prepare"
        return self._session

    @property
    def chunks(self) -> ChunkedReplica:
        """The replica's chunks; set by ``lay_out``."""
        assert self._chunks is not None, "buckets are laid out when a model is wrapped"
        return self._chunks

    @property
    @override
    def worker_rank(self) -> int | None:
        return self.session.rank if self.collective.world_size == 1 else None

    # ---- coming ------------------------------------------------------------------------------------------------

    def _check_dense(self, replica: Replica) -> None:
        if replica.sparse:
            raise ConfigurationError(
                f"parameter servers exchange dense gradients (expected sparse=False, got sparse gradients of"
                f" {replica.sparse[0]!r}). Fix: psengine.ServerEmbedding or ServerEmbeddingBag, whose rows live at the"
                " servers; or sparse=False; or strategy='sync'."
            )

    @override
    def check_ready(self, replica: Replica, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Servers are named and answer, and have no model of the job yet: this replica's is to count."""
        self._check_dense(replica)
        addresses = parse_addresses(self._servers)
        if not addresses:
            raise ConfigurationError(
                f"a training changes to strategy {self.name!r} where servers are up (expected servers= or"
                " PSENGINE_SERVERS, got neither). Fix: psengine run --servers 1."
            )
        self._is_copy = True  # a job's name that was used before gets a number
        job = name_of_job(self._job, is_copy=True)
        options = SessionOptions(
            addresses=addresses,
            job=job,
            timeout_s=self._timeout_s,
            connect_timeout_s=min(CHECK_TIMEOUT_S, self._timeout_s),
            keys=keys_from_environment(),
        )
        with WorkerSession(options) as session:
            if session.state == "ready":
                raise ConfigurationError(
                    f"the servers have a model of job {job!r} already, and that would replace this one (expected a job"
                    f" without values, got {job!r} at {addresses[0]}). Fix: another job=, or PSENGINE_JOB."
                )

    @override
    def prepare(self, replica: Replica) -> None:
        self._check_dense(replica)  # before the rendezvous, where the other workers would wait for this one
        super().prepare(replica)
        try:
            self._connect(meet(self._servers, self._job, replica.collective, replica.device, is_copy=self._is_copy))
        except BaseException:
            self.close()
            raise

    def _connect(self, rendezvous: Rendezvous) -> None:
        self.rendezvous = rendezvous
        options = SessionOptions(
            addresses=rendezvous.addresses,
            job=rendezvous.job,
            rule=self.rule,
            codec=self._codec,
            rank=rendezvous.rank,
            world_size=rendezvous.world_size,
            timeout_s=self._timeout_s,
            keys=keys_from_environment(),
            is_embedded=rendezvous.is_embedded,
        )
        with ending_with_the_job(), taking_reservation(options) as options:
            self._session = WorkerSession(options)
            self._session.segments.reserve(_shared_bytes(self.replica))
            self._session.start()
        if rendezvous.rank is None and not rendezvous.is_embedded:
            assign_worker(self._session.rank)

    @override
    def allocate(
        self, numel: int, dtype: torch.dtype, device: torch.device, *, keeps_dtype: bool = False
    ) -> torch.Tensor:
        """Memory that servers of this host read gradients from."""
        if device.type != "cpu" or self._session is None:
            return super().allocate(numel, dtype, device, keeps_dtype=keeps_dtype)
        return self._session.segments.allocate(numel, dtype)

    @override
    def lay_out(self, buckets: Sequence[Bucket]) -> None:
        self._buckets = list(buckets)
        servers = len(self.session.options.addresses)
        self._chunks = ChunkedReplica(self.replica, buckets, servers=servers, counts_usage=self.counts_usage)

    @override
    def join(self) -> None:
        """Give the servers the model, or take theirs: a model that the servers hold counts, even over replicas that are
        known to be equal.

        Raises:
            ReplicaMismatchError: the servers hold another model; the first difference is named.
        """
        with ending_with_the_job():
            state = self.session.enter(self.chunks.specs, self.chunks.values)
        if state != "initialised":
            self._receive(state)
        self._entered(state)
        logger.info(
            "worker %d of job %r: %s, %d chunks at %d shards",
            *(self.session.rank, self.session.options.job, state),
            *(len(self.chunks.specs), len(self.session.job_connection.links)),
        )

    def _receive(self, state: str) -> None:
        """The servers have values that count."""
        self.pull_values()

    def _entered(self, state: str) -> None:
        """Values equal the servers'; ``state`` is what ``WorkerSession.enter`` returned."""

    @torch.no_grad()
    def pull_values(self) -> None:
        """Overwrite this replica's tensors by the servers' values."""
        specs = self.chunks.specs
        wait_all([self.session.pull(spec.key, self.chunks.parts(spec)) for spec in specs])
        self.chunks.write_back(specs)
        # Bytes that landed are writes: older graphs and other models may depend on the old values.
        torch.autograd.graph.increment_version(self.replica.state.values())

    def await_worker_0(self, written: Mapping[int, torch.Tensor]) -> None:
        """Parameters were written after wrapping, as on worker 0, whose values count: wait until the servers have them.

        Where training is under way theirs count.

        Args:
            written: by chunk, this worker's values, 1-D on the CPU.

        Raises:
            ConfigurationError: worker 0 does not give the servers these within ``timeout_s``.
        """
        until_s = time.monotonic() + self._timeout_s
        for key, values in written.items():
            found = torch.empty_like(values)
            while self.session.pull(key, [found]).wait().version == 0 and not torch.equal(found, values):
                if time.monotonic() > until_s:
                    raise ConfigurationError(
                        f"parameters were written on worker {self.session.rank} after the model was wrapped, and worker"
                        f" 0 has not written these (expected the same values within {self._timeout_s:g} s). Fix: load a"
                        " checkpoint before psengine.DistributedDataParallel; or after it on every worker, or on worker"
                        " 0 alone."
                    )
                time.sleep(LOOK_AGAIN_S)

    # ---- checkpoints -------------------------------------------------------------------------------------------

    @override
    def residuals(self) -> dict[str, torch.Tensor]:
        """Flat, by parameter and the element they begin at."""
        found = {}
        for spec in (spec for chunks in self.chunks.of_bucket for spec, _, _ in chunks):
            residual = self.session.residual(spec.key)
            if residual is not None:
                pieces = residual.split([segment.numel for segment in spec.segments])
                found.update({f"{s.name}[{s.start}:]": piece for s, piece in zip(spec.segments, pieces, strict=True)})
        return found

    # ---- for people --------------------------------------------------------------------------------------------

    @override
    def report(self, loss: torch.Tensor | float | None = None, samples: int | None = None) -> None:
        """The servers' status shows it, from this worker's next heartbeat on. A loss on a GPU is read later."""
        if self._session is not None:
            self._session.telemetry.report(loss, samples)

    @override
    def statistics(self) -> dict[str, Any]:
        """The servers' counts; asks every shard.

        Raises:
            ServerLostError: one does not answer within ``timeout_s``.
        """
        session = self.session
        counts = counts_at_servers(session.status(), session.options.job)
        return {"worker": session.rank, **counts}

    # ---- leaving -----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Say goodbye to the servers, so that nobody waits for this worker; stop an embedded server. Safe twice."""
        self.abandon()
        rendezvous, self._abandoned = self._abandoned, None
        if rendezvous is not None:
            leave(rendezvous)

    @override
    def abandon(self) -> None:
        """``close``, but the number of the job stays taken: garbage is collected at another time on each rank, and the
        next model's job must have the same name on all.
        """
        session, rendezvous, steps = self._session, self.rendezvous, self.completed_steps
        self._forget()
        self.completed_steps = steps
        if session is not None:
            session.close()
        if rendezvous is not None:
            self._abandoned = rendezvous
            if rendezvous.embedded is not None:
                rendezvous.embedded.stop()


def _shared_bytes(replica: Replica) -> int:
    """Bytes of memory for a replica's gradients, laid out twice, each with room for its alignment."""
    room_bytes = 128
    return sum(2 * (parameter.nbytes + room_bytes) for parameter in replica.parameters.values())
