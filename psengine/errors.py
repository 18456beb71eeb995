"""The errors psengine raises.

Every one is a ``PSEngineError``; those that replace an error of native DDP also derive from the built-in type that
native DDP raises (``RuntimeError``, ``ValueError``, ``TypeError``), so existing ``except`` clauses keep working.
"""

from __future__ import annotations


class PSEngineError(Exception):
    """Base class of every error psengine raises on purpose."""


class EnvironmentVariableError(PSEngineError, RuntimeError):
    """The launcher's environment variables are incomplete or contradict each other."""


class ConfigurationError(PSEngineError, ValueError):
    """An argument has a value that psengine cannot work with."""


class ReplicaMismatchError(PSEngineError, RuntimeError):
    """The ranks' models or metrics differ in structure, so there is nothing sensible to average."""


class ReductionError(PSEngineError, RuntimeError):
    """The order of forward, backward and gradient reduction was broken (unused or reused parameters)."""


class CollectiveError(PSEngineError, RuntimeError):
    """A collective operation failed or ran past its deadline."""


class PeerLostError(CollectiveError):
    """Other ranks died or stopped answering; ``ranks`` holds their numbers in the process group.

    Attributes:
        ranks: ranks that did not answer the roll call, ascending; empty where none could be named.
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class ArgumentTypeError(PSEngineError, TypeError):
    """An argument has a type that psengine cannot work with."""


class ModuleError(PSEngineError, RuntimeError):
    """The module cannot be trained data-parallel as it is."""
