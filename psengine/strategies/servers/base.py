"""The part that the strategies over parameter servers share.

prepare     find servers, say HELLO
lay_out     buckets become chunks
join        the first worker's values go to the servers; every other worker gets the servers'
close       say goodbye; stop the server that this process started
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypedDict

import torch
from msgspec import Meta
from typing_extensions import override

from psengine.codecs.base import Codec
from psengine.codecs.registry import resolve_codec
from psengine.environment.context import assign_worker
from psengine.errors import ConfigurationError, ProtocolError, ReplicaMismatchError
from psengine.kernels import ops
from psengine.parameter_server.client.addresses import keys_from_environment, parse_addresses
from psengine.parameter_server.client.identity import ending_with_the_job, taking_reservation
from psengine.parameter_server.client.operation import wait_all
from psengine.parameter_server.client.options import SessionOptions
from psengine.parameter_server.client.partition import TensorImage, cut, cut_images, parts_of
from psengine.parameter_server.client.worker_session import WorkerSession
from psengine.protocol.bodies import AnyRule, convert
from psengine.protocol.layout import ChunkKind, ChunkSpec
from psengine.strategies.base import Capabilities, Strategy
from psengine.strategies.life_cycle import Replica
from psengine.strategies.replica_watch import account_rows
from psengine.strategies.servers.discovery import Rendezvous, leave, meet, name_of_job
from psengine.strategies.statistics import counts_at_servers
from psengine.tensors.bucket import Bucket

logger = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 300.0
# How often a worker looks for what another one gives the servers.
LOOK_AGAIN_S = 0.1
# How long a change of strategies waits for the first answer of a server.
CHECK_TIMEOUT_S = 10.0
USAGE_NAME = "psengine/used parameters"
LOSS_NAME = "psengine/losses"
ACCOUNT_NAME = "psengine/accounts of replicas"
# Chunks of no tensor of the model.
NO_TENSOR = (ChunkKind.USAGE, ChunkKind.ACCOUNT)


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


@dataclass(frozen=True, slots=True)
class _Places:
    """Where a chunk's values go: parts that tile it in order, their layout, and tensors that need a copy."""

    parts: list[torch.Tensor]
    layout: torch.Tensor
    copied: list[str]


class ChunkedReplica:
    """The chunks of a replica: its buckets' parameters first, then buffers and frozen parameters.

    Args:
        replica: as given to ``Strategy.prepare``.
        buckets: the reducer's; dense.
        servers: how many hold the chunks.
        counts_usage: whether to have a chunk for the map of used parameters, and one for losses.

    Attributes:
        specs: all chunks, by key.
        of_bucket: per bucket its chunks as (spec, start, end), which tile the bucket's flat memory in order.
        buffers: keys of the chunks of buffers.
        usage: key of the usage map, None without one.
        loss: key of what ``average_loss`` adds, None without a usage map.
        accounts: the chunks of a replica's account, with ``counts_usage``; see ``strategies/replica_watch.py``.
    """

    def __init__(self, replica: Replica, buckets: Sequence[Bucket], *, servers: int, counts_usage: bool) -> None:
        self.specs: list[ChunkSpec] = []
        self.of_bucket: list[list[tuple[ChunkSpec, int, int]]] = []
        self._replica = replica
        self._servers = servers
        self._parameters = list(replica.parameters.values())
        # Where these lie, and what ``load`` found then.
        self._lie: list[tuple[int, tuple[int, ...]]] = []
        self._places: dict[int, _Places] = {}
        self._images = {name: TensorImage(parameter) for name, parameter in replica.parameters.items()}
        for bucket in buckets:
            assert not bucket.sparse, "ServerStrategy.prepare refuses sparse gradients"
            specs = self._add(ChunkKind.PARAMETER, bucket.names, bucket.dtype)
            ends = [0]
            for spec in specs:
                ends.append(ends[-1] + spec.numel)
            self.of_bucket.append(list(zip(specs, ends, ends[1:], strict=False)))
        self.buffers = self._add_state(ChunkKind.BUFFER, set(replica.buffers()))
        frozen = {name for name in replica.state if name not in replica.parameters and name not in replica.buffers()}
        self._add_state(ChunkKind.CONSTANT, frozen)
        for name, tensor in replica.other_names.with_empty(replica.state).to_tensors().items():
            self._images[name] = TensorImage(tensor)
            self._add(ChunkKind.CONSTANT, [name], tensor.dtype)
        self.usage: int | None = None
        self.loss: int | None = None
        self.accounts: list[ChunkSpec] = []
        count = len(replica.parameters)
        if counts_usage:
            self.usage = len(self.specs)
            self.specs.extend(cut(ChunkKind.USAGE, [(USAGE_NAME, (count,), (1,), count)], torch.int32, self.usage))
            self.loss = len(self.specs)
            self.specs.extend(cut(ChunkKind.USAGE, [(LOSS_NAME, (2,), (1,), 2)], torch.float64, self.loss))
        if counts_usage and replica.options.get("check_replicas") != "off":
            account = (ACCOUNT_NAME, (account_rows(count), 4), (4, 1), 4 * account_rows(count))
            self.accounts = cut(ChunkKind.ACCOUNT, [account], torch.int64, len(self.specs))
            self.specs.extend(self.accounts)

    def _add(self, kind: ChunkKind, names: Sequence[str], dtype: torch.dtype) -> list[ChunkSpec]:
        images = {name: self._images[name] for name in names}
        specs = cut_images(kind, images, dtype, len(self.specs), servers=self._servers)
        self.specs.extend(specs)
        return specs

    def _add_state(self, kind: ChunkKind, names: set[str]) -> list[int]:
        by_dtype: dict[torch.dtype, list[str]] = {}
        for name, tensor in self._replica.state.items():
            if name in names:
                self._images[name] = TensorImage(tensor)
                by_dtype.setdefault(tensor.dtype, []).append(name)
        specs = [spec for dtype, group in by_dtype.items() for spec in self._add(kind, group, dtype)]
        return [spec.key for spec in specs]

    def follow_buffers(self) -> None:
        """Look buffers up anew: a module may have assigned others.

        Raises:
            ReplicaMismatchError: one has another shape or dtype than when the model was wrapped.
        """
        for name, buffer in self._replica.buffers().items():
            image = self._images.get(name)
            if image is None:
                continue
            known = image.tensor
            if (buffer.shape, buffer.dtype) != (known.shape, known.dtype):
                raise ReplicaMismatchError(
                    f"buffer {name!r} changed since the model was wrapped (expected shape {tuple(known.shape)},"
                    f" {known.dtype}, got {tuple(buffer.shape)}, {buffer.dtype})"
                )
            if buffer.data_ptr() != known.data_ptr() or buffer.stride() != known.stride():
                self._images[name] = TensorImage(buffer.detach(), image.strides)

    def follow_parameters(self) -> None:
        """Before ``load``: a parameter may have been given other memory."""
        lie = [(parameter.data_ptr(), parameter.stride()) for parameter in self._parameters]
        if lie != self._lie:
            self._lie = lie
            self._places.clear()

    def parts(self, spec: ChunkSpec) -> list[torch.Tensor]:
        """The memory of a chunk's values: flat CPU tensors that tile it in order, to land in."""
        return parts_of(spec, self._images)

    def write_back(self, specs: Iterable[ChunkSpec]) -> None:
        """After bytes landed in ``parts``: write images back to their tensors."""
        self.write_images(_names(specs))

    def values(self, spec: ChunkSpec) -> torch.Tensor:
        """A copy of a chunk's values: 1-D, on the CPU."""
        for name in _names([spec]):
            self._images[name].refresh()
        return torch.cat(self.parts(spec))

    def load(self, specs: Sequence[ChunkSpec], values: Sequence[torch.Tensor]) -> set[str]:
        """Overwrite chunks by their ``values``: 1-D, on the CPU. Returns the names for ``write_images``."""
        copied: set[str] = set()
        for spec, flat in zip(specs, values, strict=True):
            places = self._places.get(spec.key)
            if places is None:
                places = self._find_places(spec)
            ops.unpack_(places.parts, flat, 1.0, places.layout)
            # Older graphs and other models may depend on the old values.
            torch.autograd.graph.increment_version(places.parts)
            copied.update(places.copied)
        return copied

    def write_images(self, names: Iterable[str]) -> None:
        """Write images back to their tensors."""
        for name in names:
            self._images[name].write_back()

    def _find_places(self, spec: ChunkSpec) -> _Places:
        parts = self.parts(spec)
        copied = [name for name in _names([spec]) if not self._images[name].is_alias]
        places = _Places(parts, ops.layout_of(parts), copied)
        if spec.kind is ChunkKind.PARAMETER:
            self._places[spec.key] = places
        return places


def _names(specs: Iterable[ChunkSpec]) -> dict[str, None]:
    return {segment.name: None for spec in specs if spec.kind not in NO_TENSOR for segment in spec.segments}
