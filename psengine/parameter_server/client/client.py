"""A parameter server by tensor names, for training loops of the user's own.

::

    with psengine.connect("tcp://127.0.0.1:7077") as client:
        client.register(dict(model.named_parameters()), optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        for x, y in loader:
            loss_fn(model(x), y).backward()
            gradients = {name: p.grad for name, p in model.named_parameters()}
            client.push_pull(gradients, into=dict(model.named_parameters()))
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from psengine.codecs.base import Codec
from psengine.codecs.registry import resolve_codec
from psengine.environment.variables import read_variable
from psengine.errors import ConfigurationError, ProtocolError
from psengine.parameter_server.client.addresses import keys_from_environment, parse_addresses
from psengine.parameter_server.client.identity import DEFAULT_JOB, run_name
from psengine.parameter_server.client.operation import Operation, Push, wait_all
from psengine.parameter_server.client.options import SessionOptions
from psengine.parameter_server.client.partition import (
    NamedTensors,
    TensorImage,
    cut_images,
    parts_of,
    received,
)
from psengine.parameter_server.client.worker_session import WorkerSession
from psengine.protocol.hyperparameters import wire_groups
from psengine.protocol.keys import CurveClientKeys
from psengine.protocol.layout import ChunkKind, ChunkSpec
from psengine.protocol.messages import MAX_PAYLOAD_BYTES, Message, MessageType
from psengine.tracing.telemetry import Telemetry


class Client:
    """A client of parameter servers by tensor names. A reader connects at once, a worker when it registers its tensors.

    ``psengine.connect`` makes it. A context manager; ``close`` is idempotent.

    Args:
        servers: one address or several, the lead first, such as "tcp://a:7077,tcp://b:7077"; by default
            PSENGINE_SERVERS.
        job: name of the job; clients of one job share its values. By default PSENGINE_JOB, else "default".
        role: "worker", or "reader", which changes nothing.
        rank: this worker's number; by default the servers give the lowest free one.
        world_size: workers that the first exchange of an averaging job waits for.
        quorum: averaging jobs: go on with so many gradients of an exchange; None waits for every live worker.
        max_staleness: jobs with an optimizer: how many steps a worker may be ahead of the slowest; None: any number.
        staleness_scaling: "inverse" divides an update's learning rate by its staleness + 1.
        delay_compensation: strength of DC-ASGD's correction; 0 for none.
        compensation_decay: of the running mean that adapts this strength; None for a constant one.
        timeout_s: deadline of everything that is asked.
        connect_timeout_s: deadline of a server's first answer.
        checksum: add a checksum to every payload.
        compress: a codec, or its name, for gradients and the answers to them.
        keys: CURVE keys; by default those that PSENGINE_SERVER_KEY and PSENGINE_CLIENT_KEY name, if any.

    Raises:
        ConfigurationError: no server is named, or an address is malformed.
        ServerLostError, AuthenticationError: readers: a server does not answer, or does not let us in.
    """

    def __init__(
        self,
        servers: str | Sequence[str] | None = None,
        *,
        job: str | None = None,
        role: str = "worker",
        rank: int | None = None,
        world_size: int = 1,
        quorum: int | None = None,
        max_staleness: int | None = None,
        staleness_scaling: str | None = None,
        delay_compensation: float = 0.0,
        compensation_decay: float | None = None,
        timeout_s: float = 300.0,
        connect_timeout_s: float = 30.0,
        checksum: bool = False,
        compress: str | Codec | None = None,
        keys: CurveClientKeys | None = None,
    ) -> None:
        addresses, job = parse_addresses(servers), job or read_variable("PSENGINE_JOB") or DEFAULT_JOB
        if not addresses:
            raise ConfigurationError(
                "no parameter server is named (expected an address such as tcp://host:7077, got none). Pass servers=,"
                " or set PSENGINE_SERVERS; start one with: psengine-server"
            )
        if role not in ("worker", "reader"):
            raise ConfigurationError(f"role must be 'worker' or 'reader' (got {role!r})")
        is_reader = role == "reader"
        self._options = SessionOptions(
            addresses=addresses,
            job=job,
            run="" if is_reader else run_name(job),
            rule=None if is_reader else {"name": "average", "quorum": quorum},
            rank=rank,
            world_size=world_size,
            timeout_s=timeout_s,
            connect_timeout_s=connect_timeout_s,
            checksum=checksum,
            codec=resolve_codec(compress),
            keys=keys_from_environment() if keys is None else keys,
        )
        # The rule where an optimizer is registered.
        self._apply_rule: dict[str, Any] = {
            "name": "apply",
            "max_staleness": max_staleness,
            "staleness_scaling": staleness_scaling,
            "delay_compensation": float(delay_compensation),
            "compensation_decay": compensation_decay,
        }
        self._session: WorkerSession | None = None
        self._named: NamedTensors | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        self._optimizer: torch.optim.Optimizer | None = None
        self._last: list[Push] = []
        if is_reader:
            self._start()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def session(self) -> WorkerSession:
        """The session that this client is built on.

        Raises:
            ConfigurationError: a worker has not registered its tensors yet, or the client is closed.
        """
        if self._session is None:
            raise ConfigurationError(
                "this client is not connected (a worker connects when it calls register; a closed one does not return)"
            )
        return self._session

    @property
    def rank(self) -> int:
        """The number of this worker."""
        return self.session.rank

    def _start(self) -> None:
        if self._session is None:
            session = WorkerSession(self._options)
            session.start()
            self._session = session

    def register(
        self, named_tensors: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer | None = None
    ) -> str:
        """Take part in the job with these tensors. The first client's values become the job's; others get those.

        Args:
            named_tensors: the same names, shapes and dtypes at every worker; overwritten unless this client is first.
            optimizer: over (some of) these tensors: servers apply gradients by its rule, with its hyperparameters as
                they are at each push. None: servers average the pushed tensors, and hold no weights.

        Returns:
            "initialised", "ready" or "joined"; see ``WorkerSession.enter``.

        Raises:
            ReplicaMismatchError: the job has other tensors; the first difference is named.
            ConfigurationError: the servers cannot run this optimizer, or it has tensors that are not named.
            ServerLostError, ServerRefusedError, AuthenticationError: see ``WorkerSession.start``.
        """
        if self._named is not None:
            raise ConfigurationError("a client registers once; connect another one for other tensors")
        param_groups = [] if optimizer is None else optimizer.param_groups
        trained = {id(parameter) for group in param_groups for parameter in group["params"]}
        if trained - set(map(id, named_tensors.values())):
            raise ConfigurationError(
                "the optimizer trains a tensor that is not registered; register every tensor of its groups by name"
            )
        images: dict[tuple[ChunkKind, torch.dtype], dict[str, TensorImage]] = {}
        for name, tensor in named_tensors.items():
            is_trained = id(tensor) in trained if optimizer else tensor.is_floating_point() or tensor.is_complex()
            kind = ChunkKind.PARAMETER if is_trained else ChunkKind.BUFFER
            images.setdefault((kind, tensor.dtype), {})[name] = TensorImage(tensor)
        specs: list[ChunkSpec] = []
        for (kind, dtype), group in images.items():
            specs += cut_images(kind, group, dtype, len(specs))
        named = NamedTensors(specs)
        if optimizer is not None:
            self._options = replace(self._options, rule=self._apply_rule)
        self._start()
        initial = named.to_send(named_tensors)
        entered = self.session.enter(specs, lambda spec: _payload(spec, initial))
        self._named, self._tensors, self._optimizer = named, dict(named_tensors), optimizer
        if entered != "initialised":
            self.pull(into={name: self._tensors[name] for name in named.names})
        if optimizer is not None:
            self.session.attach_optimizer(specs, optimizer, named_tensors)
        return entered

    # ---- exchanges ---------------------------------------------------------------------------------------------

    def push_pull(
        self, gradients: Mapping[str, torch.Tensor], into: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """``push`` and wait for the answer: the new weights, or the averages, by the names of ``gradients``."""
        return self.push(gradients, into).wait()

    def push(self, gradients: Mapping[str, torch.Tensor], into: Mapping[str, torch.Tensor] | None = None) -> Exchange:
        """Send gradients; returns while they are in flight.

        Args:
            gradients: by name. With an optimizer any of the tensors; where servers average, all of them. May be changed
                afterwards.
            into: tensors by name that the answer is written to; by default new ones are made.

        Raises:
            ConfigurationError: an unknown name, a wrong shape or dtype; or some are missing where servers average.
        """
        named, session = self._require_named(), self.session
        named.check(gradients, "gradient")
        named.check(into or {}, "tensor")
        if self._optimizer is None and (missing := [name for name in named.names if name not in gradients]):
            raise ConfigurationError(
                f"where servers average, every worker pushes every tensor (expected {len(named.names)}, got"
                f" {len(gradients)}; {missing[0]!r} is missing). Push zeros where there is no gradient."
            )
        last, self._last = self._last, []
        wait_all(last)
        session.serve_joiner(self._deposit_state)
        specs = named.chunks_of(gradients)
        groups = wire_groups(self._optimizer) if self._optimizer is not None else None
        # A chunk of values is pushed whole; of a chunk of gradients those that are there.
        values = {segment.name for spec in specs if spec.kind is not ChunkKind.PARAMETER for segment in spec.segments}
        sent = named.to_send({**{name: self._tensors[name] for name in values}, **gradients})
        landing = named.to_receive(gradients, into or {})
        for spec in specs:
            is_trained = spec.kind is ChunkKind.PARAMETER
            absent = [i for i, segment in enumerate(spec.segments) if segment.name not in sent]
            payload, destinations = _payload(spec, sent), parts_of(spec, landing)
            self._last.append(session.push(spec.key, payload, destinations, groups if is_trained else None, absent))
        session.end_step()
        session.telemetry.step_ended()
        return Exchange(self._last, landing, session.telemetry)

    def _deposit_state(self) -> Iterator[Sequence[Operation]]:
        """A worker that joins an averaging job starts from this worker's tensors."""
        named = self._require_named()
        images = named.to_send(self._tensors)
        yield [self.session.store(spec.key, _payload(spec, images)) for spec in named.specs]

    def pull(self, into: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """Read the servers' values.

        Args:
            into: tensors by name to write to; by default all of the job's, in new tensors.

        Returns:
            Name to tensor.

        Raises:
            ConfigurationError: an unknown name, a wrong shape or dtype.
            ServerRefusedError: the servers hold no values ("not_ready"), as in an averaging job that has begun.
        """
        named = self._named or NamedTensors(self.session.layout())
        named.check(into or {}, "tensor")
        landing = named.to_receive(named.names if into is None else into, into or {})
        wait_all([self.session.pull(spec.key, parts_of(spec, landing)) for spec in named.chunks_of(landing)])
        return received(landing)

    # ---- for people --------------------------------------------------------------------------------------------

    def status(self) -> list[dict[str, Any]]:
        """Every shard's status report."""
        return self.session.status()

    def echo(self, size_bytes: int = 4 << 20) -> float:
        """Seconds that random bytes, at most 16 MiB, take to the first shard and back.

        Raises:
            ConfigurationError: the size is out of bounds.
            ServerLostError: nothing came back in time.
            ProtocolError: the answer has other bytes.
        """
        if not 1 <= size_bytes <= MAX_PAYLOAD_BYTES:
            raise ConfigurationError(
                f"size_bytes is out of bounds (expected 1 to {MAX_PAYLOAD_BYTES}, got {size_bytes})"
            )
        job = self.session.job_connection
        payload = torch.frombuffer(bytearray(os.urandom(size_bytes)), dtype=torch.uint8)
        what, begun_s = f"ECHO of {size_bytes} bytes", job.runtime.now_s()
        answer = job.ask(job.links[0], Message(MessageType.ECHO, payload=payload), what=what).wait()
        seconds = job.runtime.now_s() - begun_s
        if not torch.equal(answer.payload, payload):
            raise ProtocolError(f"{job.links[0].address} sent other bytes back than it got ({what})")
        return seconds

    def layout(self) -> list[ChunkSpec]:
        """The job's chunks."""
        return self.session.layout()

    def close(self) -> None:
        """Leave the servers."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def _require_named(self) -> NamedTensors:
        if self._named is None:
            raise ConfigurationError("only a worker that has called register can push; a reader only pulls")
        return self._named


class Exchange:
    """Gradients in flight."""

    def __init__(self, pushes: Sequence[Push], landing: Mapping[str, TensorImage], telemetry: Telemetry) -> None:
        self._pushes = pushes
        self._landing = landing
        self._telemetry = telemetry

    def wait(self) -> dict[str, torch.Tensor]:
        """Wait for the answers: new weights or averages, by name.

        Raises:
            ServerLostError, ServerRefusedError, FencedError: see ``Push.wait``.
        """
        with self._telemetry.blocked():
            wait_all(self._pushes)
        return received(self._landing)


def _payload(spec: ChunkSpec, images: Mapping[str, TensorImage]) -> torch.Tensor:
    """A copy of a chunk's elements."""
    return torch.cat(parts_of(spec, images))


connect = Client
