"""The errors psengine raises.

Every one is a ``PSEngineError``; those that replace an error of native DDP also derive from the built-in type that
native DDP raises (``RuntimeError``, ``ValueError``, ``TypeError``), so existing ``except`` clauses keep working.
"""

from __future__ import annotations

from typing import ClassVar

__all__ = [
    "ArgumentTypeError",
    "AuthenticationError",
    "CollectiveError",
    "CommunicationHookError",
    "ConfigurationError",
    "EnvironmentVariableError",
    "FencedError",
    "JobMismatchError",
    "MissingExtraError",
    "ModuleError",
    "NonFiniteGradientError",
    "NonFiniteLossError",
    "PSEngineError",
    "PeerLostError",
    "ProtocolError",
    "ReductionError",
    "ReplicaMismatchError",
    "RowIdError",
    "ServerError",
    "ServerLostError",
    "ServerRefusedError",
    "SharedMemoryUnavailableError",
    "SnapshotError",
    "UsageError",
]


# The end of several sentences.
RAISE_LEASE = "raise the servers' --lease-s (psengine run: --server-option lease_s=SECONDS)"


class PSEngineError(Exception):
    """Base class of every error psengine raises on purpose."""


class UsageError(PSEngineError):
    """Base class of refusals: the program, or its configuration, asks for something that psengine does not do.

    The same program ends in the same way when it is started again, so ``psengine run`` does not.
    """


class EnvironmentVariableError(UsageError, RuntimeError):
    """The launcher's environment variables are incomplete or contradict each other."""


class ConfigurationError(UsageError, ValueError):
    """An argument has a value that psengine cannot work with."""


class ReplicaMismatchError(UsageError, RuntimeError):
    """The ranks' models or metrics differ in structure, so there is nothing sensible to average."""


class ReplicasDivergedError(PSEngineError, RuntimeError):
    """Replicas that must be equal have come to differ while they trained; see ``check_replicas``.

    Attributes:
        workers: those whose parameters are not those of the lowest worker, ascending.
        parameter: the name of the first parameter that differs, in the module's order.
    """

    def __init__(self, message: str, *, workers: tuple[int, ...], parameter: str) -> None:
        super().__init__(message)
        self.workers = workers
        self.parameter = parameter


class ReductionError(UsageError, RuntimeError):
    """The order of forward, backward and gradient reduction was broken, for example by unused or reused parameters."""


class NonFiniteGradientError(PSEngineError, RuntimeError):
    """A gradient holds NaN or infinity, and ``check_finite=True`` was asked for.

    Attributes:
        ranks: ranks whose gradients are at fault, ascending; of strategies over servers this worker's own.
        parameters: names of the first parameter at fault on each of them.
    """

    def __init__(self, message: str, *, ranks: tuple[int, ...], parameters: tuple[str, ...]) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.parameters = parameters


class NonFiniteLossError(PSEngineError, RuntimeError):
    """The loss of this worker is NaN or infinite; ``psengine.stop_if_not_finite`` raises it.

    Attributes:
        worker: number of this worker in the job.
        loss: the value: NaN, or infinity with its sign.
    """

    def __init__(self, message: str, *, worker: int, loss: float) -> None:
        super().__init__(message)
        self.worker = worker
        self.loss = loss


class CollectiveError(PSEngineError, RuntimeError):
    """A collective operation failed or ran past its deadline."""


class SharedMemoryUnavailableError(CollectiveError):
    """``collective="shared_memory"`` cannot connect these ranks; the message says why. Every rank raises it."""


class PeerLostError(CollectiveError):
    """Other ranks died or stopped answering; ``ranks`` holds their numbers in the process group.

    Attributes:
        ranks: ranks that did not answer the roll call, ascending; empty where none could be named.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class ArgumentTypeError(UsageError, TypeError):
    """An argument has a type that psengine cannot work with."""


class CommunicationHookError(ArgumentTypeError, ReductionError):
    """A communication hook returned something else than a future of the bucket's new flat gradients.

    Native DDP raises a ``RuntimeError`` here; this is also a ``TypeError``.
    """


class ModuleError(UsageError, RuntimeError):
    """The module cannot be trained data-parallel as it is."""


class RowIdError(UsageError, IndexError):
    """A table has no row with this id."""


class MissingExtraError(UsageError, ImportError):
    """A package that an optional part of psengine needs is not installed; the message names the extra."""


class ServerError(PSEngineError, RuntimeError):
    """Something between a worker and its parameter servers failed."""


class ServerLostError(ServerError):
    """A server did not answer within the deadline; the message names its address, what was asked and for how long."""


class ServerRefusedError(ServerError):
    """A server understood a request and refused it.

    Attributes:
        code: one of ``psengine.protocol.messages.ErrorCode``.
    """

    def __init__(self, message: str, code: str) -> None:
        super().__init__(message)
        self.code = code


class JobMismatchError(ServerRefusedError, UsageError):
    """The servers speak another protocol version, or hold the job with another update rule or optimizer."""


class FencedError(ServerRefusedError):
    """The lease of this worker ran out, or a newer process took its rank; its updates in flight do not count.

    A script that does not handle it ends with ``EXIT_CODE``: a process that is started again takes part again.
    """

    EXIT_CODE: ClassVar[int] = 75  # EX_TEMPFAIL of sysexits.h


class AuthenticationError(ServerError, UsageError):
    """The CURVE handshake failed: a wrong or missing key."""


class ProtocolError(ServerError):
    """A peer sent bytes that the protocol does not allow.

    Attributes:
        code: the ``psengine.protocol.messages.ErrorCode`` to answer with.
    """

    def __init__(self, message: str, code: str = "bad_message") -> None:
        super().__init__(message)
        self.code = code


class SnapshotError(PSEngineError, RuntimeError):
    """A snapshot could not be written, or none could be read."""
