"""What each strategy would make of so many hosts, and which of them to take; pure.

The times are those of ``step_model``; ``CONSTANTS`` come from ``benchmarks/cluster/step_time.py``, whose table is in
benchmarks/cluster/README.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from psengine.cli.advising.step_model import Constants, Network, Road, step_s
from psengine.cli.advising.traffic import HIERARCHICAL, PLAIN, Coding, traffic
from psengine.errors import ConfigurationError
from psengine.specification import Specification

CONSTANTS = Constants(
    ring=Road(efficiency=1.0, host_s=3.7e-10),
    gathers=Road(efficiency=0.92, host_s=3.7e-10),
    servers=Road(efficiency=1.0, host_s=5.7e-10),
    operation_s=0.0015,
    value_s=6.0e-10,
    message_s=0.0002,
)
# What benchmarks/cluster/step_time.py found with them, and the most hosts of its measurements.
FIT = (
    "fitted on 2026-11-23 on 2 and 4 emulated hosts, 20 of 20 steps within 10 %; of steps that it had not seen, 47 of"
    " 56 with another model and two ranks on a host, the worst 23 % off, and 6 of 10 on 8 hosts, the worst 36 % off"
)
MOST_HOSTS = 8
# A network's delay where nobody says otherwise: two hosts in one room, through a switch.
ROUND_TRIP_S = 0.0002

EXACT, LOSSY, STALE, LOCAL = "exact", "lossy", "stale", "local"
# Of each kind the mildest first: what it changes in the result.
CANDIDATES = {
    "sync": (EXACT, "native DDP's bits"),
    HIERARCHICAL: (EXACT, "another order of addition"),
    "sync-server": (EXACT, "another order of addition"),
    "sync:compress=bf16": (LOSSY, "sums in bfloat16"),
    "sync:compress=int8": (LOSSY, "lossy, error feedback"),
    "sync:compress=fp4": (LOSSY, "lossy, error feedback"),
    "sync:compress=powersgd,rank=4": (LOSSY, "lossy, error feedback"),
    "sync:compress=onebit": (LOSSY, "lossy, error feedback"),
    "sync:compress=topk,ratio=0.01": (LOSSY, "lossy, error feedback"),
    "async": (STALE, "stale gradients"),
    "local:every=16": (LOCAL, "an average every 16 steps"),
    "diloco:every=100": (LOCAL, "an outer step every 100"),
    "diloco:every=100,compress=fp4": (LOCAL, "the same, and lossy"),
}
# Another strategy than sync has to gain so much, which is also what the model may be off by.
WORTH_IT = 1.10
# From this share of computing on there is little to gain.
BUSY = 0.95


@dataclass(frozen=True, kw_only=True)
class Training:
    """One replica.

    Attributes:
        value_bytes: gradients of a replica, as float32.
        compute_s: a step without exchange.
        samples: of a rank in a step; None where nobody knows.
    """

    value_bytes: float
    compute_s: float
    samples: float | None = None


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One strategy at so many hosts.

    Attributes:
        strategy: as users write it; "hierarchical" is that collective.
        kind: "exact", "lossy", "stale" or "local".
        changes: what it changes in the result, in words.
        step_s: seconds of a step.
        rate: samples per second of all ranks, or steps per second of all ranks where samples are not known.
        computing: share of the step that a rank would need without exchange.
        sent_bytes: of a host in a step, on average.
    """

    strategy: str
    kind: str
    changes: str
    step_s: float
    rate: float
    computing: float
    sent_bytes: float


@dataclass(frozen=True, kw_only=True)
class ScaleAdvice:
    """Predictions, the fastest first, and a sentence for each of the two questions."""

    predictions: tuple[Prediction, ...]
    lossless: str
    lossless_reason: str
    lossy: str
    lossy_reason: str


def advise_scale(training: Training, network: Network, codings: Mapping[str, Coding]) -> ScaleAdvice:
    """Predict every candidate.

    Args:
        training: one replica.
        network: the hosts.
        codings: of each codec that CANDIDATES name, by its name.
    """
    found = []
    for strategy, (kind, changes) in CANDIDATES.items():
        if strategy == HIERARCHICAL and network.ranks_per_host == 1:
            continue
        codec = Specification.parse("strategy", strategy).options.get("compress")
        cost = traffic(strategy, network.hosts, network.ranks_per_host, codings[codec] if codec else PLAIN)
        seconds = step_s(cost, training.value_bytes, training.compute_s, network, CONSTANTS)
        found.append(
            Prediction(
                strategy=strategy,
                kind=kind,
                changes=changes,
                step_s=seconds,
                rate=network.world_size * (training.samples or 1.0) / seconds,
                computing=training.compute_s / seconds,
                sent_bytes=cost.sent * training.value_bytes,
            )
        )
    exact, lossless_reason = _lossless({one.strategy: one for one in found if one.kind == EXACT})
    lossy, lossy_reason = _lossy(exact, [one for one in found if one.kind == LOSSY], _best(found, LOCAL))
    return ScaleAdvice(
        predictions=tuple(sorted(found, key=lambda one: one.step_s)),
        lossless=exact.strategy,
        lossless_reason=lossless_reason,
        lossy=lossy.strategy,
        lossy_reason=lossy_reason,
    )


def _best(found: list[Prediction], kind: str) -> Prediction:
    return min((one for one in found if one.kind == kind), key=lambda one: one.step_s)


def _lossless(exact: Mapping[str, Prediction]) -> tuple[Prediction, str]:
    """sync, unless another one is clearly faster."""
    sync = exact["sync"]
    best = min(exact.values(), key=lambda one: one.step_s)
    if sync.computing >= BUSY:
        return sync, f"sync: ranks compute {sync.computing:.0%} of the time, so the network costs next to nothing."
    if sync.step_s >= WORTH_IT * best.step_s:
        gain = sync.step_s / best.step_s - 1
        return best, f"{best.strategy}: {gain:.0%} faster than sync; {best.changes}."
    return sync, (
        f"sync: no other lossless strategy is {WORTH_IT - 1:.0%} faster; ranks compute {sync.computing:.0%} of the"
        " time."
    )


def _lossy(exact: Prediction, lossy: list[Prediction], local: Prediction) -> tuple[Prediction, str]:
    """The mildest codec that is within 10 % of the fastest one; nothing lossy where nothing is gained."""
    if exact.computing >= BUSY:
        return exact, f"none: {exact.strategy} computes {exact.computing:.0%} of the time already."
    fastest = min(lossy, key=lambda one: one.step_s)
    chosen = next(one for one in lossy if one.step_s <= WORTH_IT * fastest.step_s)
    gain = exact.step_s / chosen.step_s
    further = ""
    if chosen.step_s >= WORTH_IT * local.step_s:
        further = (
            f" {local.strategy} would be {chosen.step_s / local.step_s:.1f} times as fast again, where replicas may"
            " differ between exchanges."
        )
    if gain < WORTH_IT:
        return exact, f"no codec: none makes a step {WORTH_IT - 1:.0%} shorter than {exact.strategy}.{further}"
    return chosen, (
        f"{chosen.strategy}: {gain:.1f} times as fast as {exact.strategy}, and within {WORTH_IT - 1:.0%} of the fastest"
        f" codec; {chosen.changes}.{further}"
    )


def checked_network(hosts: int, mbit: float | None, round_trip_ms: float | None, ranks_per_host: int) -> Network:
    """The hosts that the options describe.

    Raises:
        ConfigurationError: a number is missing, or out of its range.
    """
    if hosts < 2:
        raise ConfigurationError(
            f"--hosts counts hosts that exchange over a network (expected 2 or more, got {hosts})."
            " Fix: leave it out to compare the ranks of this host"
        )
    if mbit is None:
        raise ConfigurationError(
            "--hosts needs the rate of a host's link (expected --mbit, in Mbit/s, such as --mbit 1000, got none)"
        )
    if not 0 < mbit < float("inf"):
        raise ConfigurationError(f"--mbit is the rate of a host's link (expected a number above 0, got {mbit:g})")
    delay_ms = ROUND_TRIP_S * 1000 if round_trip_ms is None else round_trip_ms
    if not 0 <= delay_ms < float("inf"):
        raise ConfigurationError(f"--round-trip-ms is a delay (expected 0 or more, got {delay_ms:g})")
    if ranks_per_host < 1:
        raise ConfigurationError(f"--ranks-per-host is a number (expected 1 or more, got {ranks_per_host})")
    return Network(hosts=hosts, ranks_per_host=ranks_per_host, bytes_per_s=mbit * 1e6 / 8, round_trip_s=delay_ms / 1000)


def checked_training(parameters: str | None, step_ms: float | None, script: Sequence[str]) -> Training:
    """The replica that ``--parameters`` and ``--step-ms`` describe.

    Raises:
        ConfigurationError: one is missing or malformed, or there is a script too.
    """
    if parameters is None or step_ms is None:
        raise ConfigurationError(
            "--parameters and --step-ms describe a training together (expected both, or a script to measure, got"
            f" {'--step-ms' if parameters is None else '--parameters'} alone)"
        )
    if script:
        raise ConfigurationError(
            f"--parameters and --step-ms stand for a script (expected no script, got {script[0]}). Fix: leave out"
            " either"
        )
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGB]?)", parameters.upper())
    count = 0.0 if match is None else float(match[1]) * {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "B": 1e9}[match[2]]
    if not 1 <= count < 1e15:
        raise ConfigurationError(f"--parameters is a number (expected such as 8700000, 124M or 7B, got {parameters})")
    if not 0 < step_ms < float("inf"):
        raise ConfigurationError(
            f"--step-ms is the time of a step without exchange (expected a number above 0, got {step_ms:g})"
        )
    return Training(value_bytes=4 * count, compute_s=step_ms / 1000)
