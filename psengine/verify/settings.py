"""``Settings`` of a comparison: the strategies, the number of steps and ranks, the tolerances."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from psengine.errors import ConfigurationError
from psengine.specification import Specification
from psengine.strategies.registry import STRATEGIES, resolve_strategy
from psengine.verify.ranks import MAX_RANKS

NATIVE = "native"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How ``compare`` trains, and which differences are within tolerance.

    Attributes:
        steps: how many each training takes.
        world_size: number of ranks, processes on this machine.
        strategy: "native" for native DDP, or a strategy: "sync", "async:staleness_scaling=inverse", ... Those over
            servers get a server of their own, unless they name one.
        against: the same, for the reference.
        seed: of the model; ranks draw dropout and the like from it and their rank.
        rtol: two numbers may differ by atol + rtol * the largest magnitude in the reference's tensor. Default:
            torch.testing's tolerances for the dtype.
        atol: see rtol. If only one of the two is given, the other is 0.
        device: "cpu", or "cuda".
        timeout_s: deadline of the whole comparison.

    Raises:
        ConfigurationError: a value is out of its range, a strategy is unknown, or there is no such device here.
    """

    steps: int = 10
    world_size: int = 2
    strategy: str = "sync"
    against: str = NATIVE
    seed: int = 0
    rtol: float | None = None
    atol: float | None = None
    device: str = "cpu"
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        for what, number, least, most in (
            ("steps", self.steps, 1, 10**6),
            ("world_size", self.world_size, 1, MAX_RANKS),
            ("seed", self.seed, 0, 2**31),
            ("rtol", self.rtol or 0, 0, 1e9),
            ("atol", self.atol or 0, 0, 1e9),
            ("timeout_s", self.timeout_s, 1e-3, 1e9),
        ):
            is_number = isinstance(number, type(most) if isinstance(most, int) else (int, float))
            if not is_number or isinstance(number, bool) or not least <= number <= most:
                raise ConfigurationError(f"{what} is out of range (expected {least:g} to {most:g}, got {number!r})")
        if self.device not in ("cpu", "cuda"):
            raise ConfigurationError(f"unknown device (expected 'cpu' or 'cuda', got {self.device!r})")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigurationError("device 'cuda' needs a GPU that this torch can use (got none). Fix: --device cpu")
        self._check_exchange(self.strategy)
        self._check_exchange(self.against)

    def _check_exchange(self, exchange: str) -> None:
        if not isinstance(exchange, str):
            raise ConfigurationError(f"a strategy is a name here (expected {NATIVE!r} or a strategy, got {exchange!r})")
        try:
            is_over_servers(exchange)
        except ConfigurationError as error:
            if exchange.partition(":")[0] in STRATEGIES:
                raise
            raise ConfigurationError(f"{error} ({NATIVE!r} is native DDP)") from error

    @property
    def needs_server(self) -> bool:
        """Whether one of the strategies meets at a server and names none."""
        return any(
            is_over_servers(name) and "servers" not in Specification.parse("strategy", name).options
            for name in (self.strategy, self.against)
        )


def is_over_servers(exchange: str) -> bool:
    """Whether ranks that train under ``exchange`` meet at servers."""
    if exchange == NATIVE:
        return False
    return not resolve_strategy(exchange).capabilities.needs_process_group
