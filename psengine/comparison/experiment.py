"""``compare``: train a target two ways from the same seed, in real processes, and find the first difference."""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from psengine.comparison import target as targets
from psengine.comparison.launch import MOST_RANKS, RankFailedError, run_ranks
from psengine.comparison.servers import comparison_server
from psengine.comparison.training import NATIVE
from psengine.comparison.verdict import Comparison, is_different, merge
from psengine.comparison.zoo import ZOO
from psengine.errors import ConfigurationError
from psengine.strategies.registry import STRATEGIES, resolve_strategy

WORKER = "psengine.comparison.worker"


def compare(
    target: str,
    *,
    steps: int = 10,
    world_size: int = 2,
    strategy: str = "sync",
    against: str = NATIVE,
    seed: int = 0,
    rtol: float | None = None,
    atol: float | None = None,
    device: str = "cpu",
    timeout_s: float = 300.0,
    on_note: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Train ``target`` under ``strategy`` and under ``against`` side by side; report what differs.

    Args:
        target: "module:function" or "path/to/file.py:function". The function takes no arguments and returns ``(model,
            batch_fn, loss_fn, optimizer_fn)``, and as a fifth part keyword arguments for both wrappers if any; see
            ``Target``. It is called once for each training, on each rank.
        steps: how many each takes.
        world_size: number of ranks, processes on this machine.
        strategy: "native" for native DDP, or a strategy: "sync", "async:max_staleness=4", ... Those over servers get
            a server of their own, unless they name one.
        against: the same, for the reference.
        seed: of the model; ranks draw dropout and the like from it and their rank.
        rtol: how far numbers may be apart: atol + rtol * the largest magnitude in the reference's tensor. Without both,
            torch.testing's for the dtype.
        atol: see rtol; one that is given leaves the other 0.
        device: "cpu", or "cuda".
        timeout_s: deadline of the whole comparison.
        on_note: told now and then what rank 0 is doing.

    Raises:
        ConfigurationError: an argument is wrong, the target cannot be found or is none, or a strategy refuses it.
        RankFailedError: the target's code raised (its traceback is in ``rank_traceback``), a rank died, or the
            deadline passed.
    """
    targets.check_name(target)
    arguments = _checked(steps, world_size, strategy, against, seed, rtol, atol, device, timeout_s)
    return _compare_all(target, (), arguments, on_note)[0]


def compare_zoo(
    names: Sequence[str] = tuple(ZOO),
    *,
    steps: int = 6,
    world_size: int = 2,
    strategy: str = "sync",
    against: str = NATIVE,
    seed: int = 0,
    rtol: float | None = None,
    atol: float | None = None,
    device: str = "cpu",
    timeout_s: float = 300.0,
    on_note: Callable[[str], None] = lambda text: None,
) -> list[Comparison]:
    """``compare`` for built-in models, one after the other on the same ranks; one that a strategy does not take is
    "refused". Arguments and errors are ``compare``'s, but for ``names``.
    """
    unknown = [name for name in names if name not in ZOO]
    if unknown or not names:
        raise ConfigurationError(f"the zoo has no such model (expected some of {', '.join(ZOO)}; got {unknown})")
    arguments = _checked(steps, world_size, strategy, against, seed, rtol, atol, device, timeout_s)
    return _compare_all(None, names, arguments, on_note)


def _compare_all(
    target: str | None, zoo: Sequence[str], arguments: dict[str, Any], on_note: Callable[[str], None]
) -> list[Comparison]:
    deadline_s = time.monotonic() + arguments["timeout_s"]
    with _server(arguments["strategy"], arguments["against"]) as address:
        work = {**arguments, "target": target, "zoo": list(zoo), "server": address}
        reports = _train(work, arguments["timeout_s"], on_note)
        different = [name for name in reports if is_different(reports[name])]
        controls, why_no_control = {}, ""
        if different and arguments["strategy"] == arguments["against"]:
            controls = {name: reports[name] for name in different}
        elif different:
            # In processes that have not trained yet: what the target keeps at module level is as it was for the first
            # two trainings.
            control = {**work, "strategy": arguments["against"], "zoo": different}
            try:
                left_s = max(0.1, deadline_s - time.monotonic())
                controls = _train(control, left_s, lambda text: on_note(f"control: {text}"))
            except RankFailedError as error:
                why_no_control = str(error)
    common = {key: arguments[key] for key in ("strategy", "against", "steps", "seed")}
    return [
        merge(
            reports[name],
            target=name,
            **common,
            controls=controls.get(name, ()),
            why_no_control=why_no_control if name in different else "",
        )
        for name in reports
    ]


def _train(work: dict[str, Any], timeout_s: float, on_note: Callable[[str], None]) -> dict[str, list[dict[str, Any]]]:
    """The ranks' reports, in rank order, by name of the target."""
    reports = run_ranks(
        WORKER,
        {**work, "job": f"verify-{uuid.uuid4().hex}"},
        world_size=work["world_size"],
        timeout_s=timeout_s,
        device=work["device"],
        on_note=on_note,
    )
    return {name: [report[name] for report in reports] for name in reports[0]}


@contextmanager
def _server(*exchanges: str) -> Iterator[str | None]:
    """The address of a server for those strategies that need one and name none; not that of a job that is at work."""
    if not any(_needs_server(exchange) for exchange in exchanges):
        yield None
        return
    with comparison_server() as address:
        yield address


def _needs_server(exchange: str) -> bool:
    return exchange != NATIVE and not resolve_strategy(exchange).needs_process_group and "servers=" not in exchange


def _checked(
    steps: int,
    world_size: int,
    strategy: str,
    against: str,
    seed: int,
    rtol: float | None,
    atol: float | None,
    device: str,
    timeout_s: float,
) -> dict[str, Any]:
    """The arguments by name, once they are known to make sense."""
    for what, number, least, most in (
        ("steps", steps, 1, 10**6),
        ("world_size", world_size, 1, MOST_RANKS),
        ("seed", seed, 0, 2**31),
    ):
        if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most:
            raise ConfigurationError(f"{what} is a whole number (expected {least} to {most}, got {number!r})")
    for what, tolerance in (("rtol", rtol), ("atol", atol)):
        if tolerance is not None and not (isinstance(tolerance, int | float) and 0 <= tolerance < math.inf):
            raise ConfigurationError(f"{what} is a tolerance (expected a number of at least 0, got {tolerance!r})")
    if not (isinstance(timeout_s, int | float) and 0 < timeout_s < math.inf):
        raise ConfigurationError(f"timeout_s is a positive number of seconds (got {timeout_s!r})")
    if device not in ("cpu", "cuda"):
        raise ConfigurationError(f"unknown device (expected 'cpu' or 'cuda', got {device!r})")
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigurationError("device 'cuda' needs a GPU that this torch can use (got none). Fix: --device cpu")
    for exchange in (strategy, against):
        if not isinstance(exchange, str):
            raise ConfigurationError(f"a strategy is named here (expected 'native' or a strategy, got {exchange!r})")
        if exchange != NATIVE:
            _check_strategy(exchange)
    return {
        "steps": steps,
        "world_size": world_size,
        "strategy": strategy,
        "against": against,
        "seed": seed,
        "rtol": rtol,
        "atol": atol,
        "device": device,
        "timeout_s": float(timeout_s),
    }


def _check_strategy(exchange: str) -> None:
    name = exchange.partition(":")[0]
    if name not in STRATEGIES:
        raise ConfigurationError(
            f"unknown strategy (expected {NATIVE!r} for native DDP, or one of {sorted(STRATEGIES)}, got {name!r})"
        )
    resolve_strategy(exchange)
