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
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from psengine.codecs.base import Codec
from psengine.codecs.registry import resolve_codec
from psengine.environment.variables import read_variable
from psengine.errors import ConfigurationError, ProtocolError
from psengine.parameter_server.client.addresses import keys_from_environment, parse_addresses
from psengine.parameter_server.client.identity import DEFAULT_JOB, run_name
from psengine.parameter_server.client.operation import wait_all
from psengine.parameter_server.client.options import SessionOptions
from psengine.parameter_server.client.partition import NamedTensors, TensorImage, cut_images, parts_of, received
from psengine.parameter_server.client.table_parts import TableParts, read_tables
from psengine.parameter_server.client.worker_session import WorkerSession
from psengine.protocol.hyperparameters import wire_groups
from psengine.protocol.keys import CurveClientKeys
from psengine.protocol.layout import OTHER_NAMES, ChunkKind, ChunkSpec, OtherNames
from psengine.protocol.messages import MAX_PAYLOAD_BYTES, Message, MessageType


class Client:
    """A client of parameter servers by tensor names. A reader connects at once, a worker when it registers its tensors.

    ``psengine.connect`` makes it. A context manager; ``close`` is idempotent.

    Args:
        servers: one address or several, the lead first, such as "tcp://a:7077,tcp://b:7077"; by default
            PSENGINE_SERVERS.
        job: name of the job; clients of one job share its values. By default PSENGINE_JOB, else "default".
        role: "worker", or "reader", which changes nothing.
        rank: this worker's number; by default the servers give the lowest free one.
        max_staleness: how many steps a worker may be ahead of the slowest; None: any number.
        staleness_scaling: "inverse" divides an update's learning rate by its staleness + 1.
        delay_compensation: strength of DC-ASGD's correction; 0 for none.
        compensation_decay: of the running mean that adapts this strength; None for a constant one.
        timeout_s: deadline of everything that is asked.
        connect_timeout_s: deadline of a server's first answer.
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
        max_staleness: int | None = None,
        staleness_scaling: str | None = None,
        delay_compensation: float = 0.0,
        compensation_decay: float | None = None,
        timeout_s: float = 300.0,
        connect_timeout_s: float = 30.0,
        compress: str | Codec | None = None,
        keys: CurveClientKeys | None = None,
    ) -> None:
        addresses, job = parse_addresses(servers), job or read_variable("PSENGINE_JOB") or DEFAULT_JOB
        if not addresses:
            raise ConfigurationError(
                "no parameter server is named (expected an address such as tcp://host:7077, got none). Pass servers=,"
                " or set PSENGINE_SERVERS; start one with: psengine-server, or psengine run --servers 1"
            )
        if role not in ("worker", "reader"):
            raise ConfigurationError(f"role must be 'worker' or 'reader' (got {role!r})")
        is_reader = role == "reader"
        rule = {
            "name": "apply",
            "max_staleness": max_staleness,
            "staleness_scaling": staleness_scaling,
            "delay_compensation": float(delay_compensation),
            "compensation_decay": compensation_decay,
        }
        self._options = SessionOptions(
            addresses=addresses,
            job=job,
            run="" if is_reader else run_name(job),
            rule=None if is_reader else rule,
            rank=rank,
            timeout_s=timeout_s,
            connect_timeout_s=connect_timeout_s,
            codec=resolve_codec(compress),
            keys=keys_from_environment() if keys is None else keys,
        )
        self._session: WorkerSession | None = None
        self._named: NamedTensors | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        self._optimizer: torch.optim.Optimizer | None = None
        self._tables: dict[str, TableParts] = {}
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
            ConfigurationError: a worker has not registered its tensors yet.
        """
        if self._session is None:
            raise ConfigurationError("this client is not connected (a worker connects when it calls register)")
        return self._session

    def _start(self) -> None:
        if self._session is None:
            session = WorkerSession(self._options)
            session.start()
            self._session = session

    def register(self, named_tensors: Mapping[str, torch.Tensor], optimizer: torch.optim.Optimizer) -> str:
        """Take part in the job with these tensors. The first client's values become the job's; others get those.

        Args:
            named_tensors: the same names, shapes and dtypes at every worker; overwritten unless this client is first.
            optimizer: over (some of) these tensors: servers apply gradients by its rule, with its hyperparameters as
                they are at each push.

        Returns:
            "initialised" or "ready"; see ``WorkerSession.enter``.

        Raises:
            ReplicaMismatchError: the job has other tensors; the first difference is named.
            ConfigurationError: the servers cannot run this optimizer, or it has tensors that are not named.
            ServerLostError, ServerRefusedError, AuthenticationError: see ``WorkerSession.start``.
        """
        if self._named is not None or self._options.rule is None:
            raise ConfigurationError("a worker registers, and once; connect another one (role='worker')")
        trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        if trained - set(map(id, named_tensors.values())):
            raise ConfigurationError(
                "the optimizer trains a tensor that is not registered; register every tensor of its groups by name"
            )
        images: dict[tuple[ChunkKind, torch.dtype], dict[str, TensorImage]] = {}
        for name, tensor in named_tensors.items():
            kind = ChunkKind.PARAMETER if id(tensor) in trained else ChunkKind.BUFFER
            images.setdefault((kind, tensor.dtype), {})[name] = TensorImage(tensor)
        specs: list[ChunkSpec] = []
        for (kind, dtype), group in images.items():
            specs += cut_images(kind, group, dtype, len(specs), servers=len(self._options.addresses))
        others = OtherNames().with_empty(named_tensors).to_tensors()
        described = {name: TensorImage(tensor) for name, tensor in others.items()}
        specs += cut_images(
            ChunkKind.CONSTANT, described, torch.uint8, len(specs), servers=len(self._options.addresses)
        )
        named = NamedTensors(specs)
        self._start()
        initial = named.to_send({**named_tensors, **others})
        entered = self.session.enter(specs, lambda spec: _payload(spec, initial))
        self._named, self._tensors, self._optimizer = named, dict(named_tensors), optimizer
        if entered != "initialised":
            self.pull(into={name: self._tensors[name] for name in named.names})
        self.session.attach_optimizer(specs, optimizer, named_tensors)
        return entered

    # ---- exchanges ---------------------------------------------------------------------------------------------

    def push_pull(
        self, gradients: Mapping[str, torch.Tensor], into: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """Send gradients; returns the new weights by the names of ``gradients``.

        Args:
            gradients: by name, any of the tensors; the new values of one that the optimizer does not train.
            into: tensors by name that the answer is written to; by default new ones are made.

        Raises:
            ConfigurationError: an unknown name, a wrong shape or dtype; or the tensors are not registered.
            ServerLostError, ServerRefusedError: see ``Request.wait``.
        """
        named, optimizer, session = self._named, self._optimizer, self.session
        if named is None or optimizer is None:
            raise ConfigurationError("only a worker that has called register can push; a reader only pulls")
        named.check(gradients, "gradient")
        named.check(into or {}, "tensor")
        specs, groups, pushes = named.chunks_of(gradients), wire_groups(optimizer), []
        # A chunk of values is pushed whole; of a chunk of gradients those that are there.
        values = {segment.name for spec in specs if spec.kind is not ChunkKind.PARAMETER for segment in spec.segments}
        sent = named.to_send({**{name: self._tensors[name] for name in values}, **gradients})
        landing = named.to_receive(gradients, into or {})
        for spec in specs:
            absent = [i for i, segment in enumerate(spec.segments) if segment.name not in sent]
            of_spec = groups if spec.kind is ChunkKind.PARAMETER else None
            pushes.append(session.push(spec.key, _payload(spec, sent), parts_of(spec, landing), of_spec, absent))
        with session.telemetry.blocked():
            wait_all(pushes)
        session.telemetry.step_ended()
        return received(landing)

    def pull(self, into: Mapping[str, torch.Tensor] | None = None) -> dict[str, torch.Tensor]:
        """Read the servers' values.

        Args:
            into: tensors by name to write to, such as a ``state_dict``; by default all of the job's, in new tensors.

        Returns:
            Name to tensor: ``into``, or what the model's ``load_state_dict(strict=True)`` takes, tied names and tensors
            without elements too.

        Raises:
            ConfigurationError: an unknown name, a wrong shape or dtype.
            ServerRefusedError: the servers hold no values ("not_ready"), as under ``sync-server``.
        """
        named = self._named or NamedTensors(self.session.layout())
        others = OtherNames.take(self._receive(named, [OTHER_NAMES], {}))
        if into is None:
            return others.complete(self._receive(named, named.names, {}))
        names = {name: others.tied.get(name, name) for name in into}
        for name, tensor in into.items():
            named.check({names[name]: tensor}, "tensor")
        values = self._receive(named, names.values(), {names[name]: tensor for name, tensor in into.items()})
        for name, tensor in into.items():  # tied names may have memory of their own here
            if (value := values.get(names[name], tensor)) is not tensor:
                tensor.detach().copy_(value)
        return dict(into)

    def _receive(
        self, named: NamedTensors, names: Iterable[str], into: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        landing = named.to_receive(names, into)
        wait_all([self.session.pull(spec.key, parts_of(spec, landing)) for spec in named.chunks_of(landing)])
        return received(landing)

    def rows(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """Return rows of a table of this job's model as they are now, on the device of ``ids``.

        Args:
            name: the table's; without one of its own, its module's path in the model.
            ids: int64 or int32, of any shape.

        Returns:
            float32 ``[*ids.shape, dim]``.

        Raises:
            ConfigurationError: no worker of the job has such a table.
            RowIdError: the table has no such row.
            ServerLostError: see ``Request.wait``.
        """
        if name not in self._tables:
            self._leave_tables()
            self._tables = read_tables(self._options)
        if name not in self._tables:
            raise ConfigurationError(
                f"job {self._options.job!r} has no table {name!r} (expected one of {sorted(self._tables) or 'none'})."
                " Fix: name another, or another job=; or wait for the first worker."
            )
        return self._tables[name].rows(ids)

    def _leave_tables(self) -> None:
        for session in {parts.session for parts in self._tables.values()}:
            session.close()

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
        self._leave_tables()
        if self._session is not None:
            self._session.close()


def _payload(spec: ChunkSpec, images: Mapping[str, TensorImage]) -> torch.Tensor:
    """A copy of a chunk's elements."""
    return torch.cat(parts_of(spec, images))


connect = Client
