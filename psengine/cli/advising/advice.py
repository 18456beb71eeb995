"""Which strategy fits these step times? Pure arithmetic over what was measured under "sync".

Each strategy is a rule for when a step may begin::

    c(r, k)    seconds that rank r computes in step k
    e          seconds that an exchange takes: under sync the collective's, under the others the servers'
    b(r)       samples of rank r in a step
    f(r, k)    the time at which rank r has exchanged its step k

    sync              f(., k) = max over r of [f(., k-1) + c(r, k)] + e
    sync-server:      arrive(r, k) = start(r, k) + c(r, k) + e;  close(k) = the Q-th smallest arrive(., k), and no
      quorum=Q        earlier than arrive(r, k-8) of any r; start(r, k+1) = max(arrive(r, k), close(k)); a gradient
                      counts if arrive(r, k) <= close(k)
    async             f(r, k) = f(r, k-1) + c(r, k) + e
    async:            f(r, k) = max(f(r, k-1), max over q of f(q, k-1-S)) + c(r, k) + e
      max_staleness=S
    local:every=H     f(., n+H) = max over r of [f(., n) + c(r, n+1) + ... + c(r, n+H)] + e, for n = 0, H, 2H, ...
    diloco-server:    as async, with e / H
      every=H

The rate is the number of samples that counted, divided by the time of the slowest rank (async: the sum of the ranks'
rates). The measured steps are repeated until the start no longer matters. What staleness costs in accuracy is not
included.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from psengine.cli.advising.step_times import StepTimes

# sync-server keeps a late worker's averages for so many steps.
KEPT_AVERAGES = 8
MAX_STALENESS = 4
# The async that learnt best in benchmarks/straggler; as fast as any without a bound.
BEST_ASYNC = "async:staleness_scaling=inverse"
# They exchange less often, which changes what is learnt more than staleness does: shown, and never the verdict.
LOCAL_STEPS, MERGED_STEPS = 16, 100
LOCAL, MERGED = f"local:every={LOCAL_STEPS}", f"diloco-server:every={MERGED_STEPS}"
# The gain from which on shares are advised; they compute the same as sync.
WORTH_IT = 1.10
# The gain from which on another strategy is worth its staleness, or its dropped gradients.
WORTH_LEAVING = 1.25
# Times of shorter steps are mostly Python's and the scheduler's.
SHORTEST_S = 0.010
# Where the medians of two ranks differ by more than this factor, one rank is always slow.
SIMILAR = 1.15
_SIMULATED_STEPS = 400

Times = Sequence[Sequence[float]]  # [rank][step], seconds


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """One rank's row: seconds of computing in a step, and the share of its time that it waited."""

    rank: int
    host: str
    median_s: float
    p90_s: float
    waited_share: float


@dataclass(frozen=True, kw_only=True)
class Advice:
    """The advised strategy, and the reason.

    Attributes:
        verdict: "similar" (no strategy gains enough over sync), "permanent" (one rank is always slow, and shares make
            up for it), "passing" (slowness moves from rank to rank) or "short" (steps too short to judge).
        strategy: what to give to ``--strategy``.
        reason: a sentence or two.
        shares: for ``psengine.ProportionalSampler``, in order of rank, the slowest 1; () unless the verdict is
            "permanent".
        spread: largest over smallest median.
        predictions: strategy to predicted samples per second; where medians differ, "sync with shares" too.
        ranks: a row each.
    """

    verdict: str
    strategy: str
    reason: str
    shares: tuple[float, ...]
    spread: float
    predictions: dict[str, float]
    ranks: tuple[RankTimes, ...]


def advise(times: StepTimes, server_exchange_s: float | None = None) -> Advice:
    """Judge measured steps; see the module's text for the arithmetic.

    Args:
        times: measured under sync.
        server_exchange_s: what an exchange through servers takes; None takes what the collective took.
    """
    exchange_s, samples = times.exchange_s, times.samples
    through_s = exchange_s if server_exchange_s is None else server_exchange_s
    medians = [statistics.median(own) for own in times.compute_s]
    spread = max(medians) / max(min(medians), 1e-9)
    looped = loop(times.compute_s, _SIMULATED_STEPS)
    bounded = f"async:max_staleness={MAX_STALENESS}"
    predictions = {"sync": sync_rate(looped, samples, exchange_s)}
    if times.world_size > 2:
        quorum = times.world_size - 1
        predictions[f"sync-server:quorum={quorum}"] = quorum_rate(looped, samples, through_s, quorum)
    predictions[bounded] = bounded_rate(looped, samples, through_s, MAX_STALENESS)
    predictions[BEST_ASYNC] = predictions["async"] = async_rate(looped, samples, through_s)
    predictions[LOCAL] = local_rate(looped, samples, exchange_s, LOCAL_STEPS)
    predictions[MERGED] = async_rate(looped, samples, through_s / MERGED_STEPS)
    shares: tuple[float, ...] = ()
    if spread > SIMILAR:
        shares = sampler_shares(medians, samples)
        predictions["sync with shares"] = sync_rate(*apply_shares(looped, samples, shares), exchange_s)
    verdict, strategy, reason = _judge(predictions, spread, medians, exchange_s)
    return Advice(
        verdict=verdict,
        strategy=strategy,
        reason=reason,
        shares=shares if verdict == "permanent" else (),
        spread=spread,
        predictions=predictions,
        ranks=tuple(_row(times, rank, medians[rank]) for rank in range(times.world_size)),
    )


def _judge(
    predictions: dict[str, float], spread: float, medians: Sequence[float], exchange_s: float
) -> tuple[str, str, str]:
    """(verdict, strategy, reason)."""
    step_s = max(medians) + exchange_s
    if step_s < SHORTEST_S:
        reason = (
            f"steps of {step_s * 1e3:.1f} ms are too short to judge (expected {SHORTEST_S * 1e3:g} ms or more): the"
            " scheduler's noise is larger than the ranks' differences. Stay with sync, or measure with the model and"
            " the batch size that you will train with."
        )
        return "short", "sync", reason
    gains = {name: rate / predictions["sync"] for name, rate in predictions.items()}
    shares = gains.get("sync with shares", 0.0)
    # Judged by what a bound leaves of async's gain: that is what slowness costs which moves, and no lasting one.
    shown_only = "async", BEST_ASYNC, LOCAL, MERGED
    others = {name: gain for name, gain in gains.items() if name not in ("sync", "sync with shares", *shown_only)}
    best = max(others, key=lambda name: others[name])
    slowest = medians.index(max(medians))
    is_clear = others[best] >= WORTH_LEAVING
    if shares >= WORTH_IT and (not is_clear or shares * WORTH_IT >= others[best]):
        reason = (
            f"rank {slowest} is always slow ({spread:.2f} times the fastest's step time). Shares by speed compute the"
            f" same as sync. Where shares must stay equal, {BEST_ASYNC} does not wait for it, nor does {MERGED}, which"
            f" merges every {MERGED_STEPS} steps"
        )
        if others[best] < WORTH_IT:
            reason += f"; a bound on staleness or a quorum would hold the others at rank {slowest}'s pace"
        return "permanent", "sync", f"{reason}."
    if not is_clear:
        return "similar", "sync", _why_sync(gains, spread, slowest, exchange_s / max(medians))
    how = "Let a step go on without the last"
    if best.startswith("async"):
        best = BEST_ASYNC
        how = (
            "Let ranks be some steps apart, with stale gradients counting less: of all async this learnt best in"
            f" psengine's benchmark, where max_staleness={MAX_STALENESS} never reached its target accuracy"
        )
    if spread > SIMILAR:
        reason = (
            f"rank {slowest} is slower than the fastest ({spread:.2f} times), but slowness that moves from rank to rank"
            f" costs more: shares by speed gain {shares - 1:.0%}, {best} {gains[best] - 1:.0%}. {how}."
        )
    else:
        reason = f"slowness moves from rank to rank, and no rank is slow for long. {how}."
    return "passing", best, reason


def _why_sync(gains: dict[str, float], spread: float, slowest: int, exchange_share: float) -> str:
    """Why nothing gains enough; ``exchange_share``: of an exchange in the slowest rank's step."""
    enough = f"{WORTH_LEAVING - 1:.0%}"
    if spread <= SIMILAR:
        reason = f"the ranks are similar: no other strategy gains {enough}, which would be worth its staleness."
    else:
        is_hidden = exchange_share > spread - 1
        reason = (
            f"rank {slowest} computes {spread:.2f} times as long as the fastest, but"
            f" {'the exchange outweighs the difference' if is_hidden else 'the difference is too small'}: shares gain"
            f" less than {WORTH_IT - 1:.0%}, bounded staleness less than {enough}."
        )
        if is_hidden:
            reason += " Exchange fewer bytes, or less often: psengine advise --hosts predicts codecs and local steps."
    if gains["async"] >= WORTH_LEAVING:
        reason += f" Only async without a bound on staleness gains more ({gains['async'] - 1:.0%})."
    return reason


def _row(times: StepTimes, rank: int, median_s: float) -> RankTimes:
    compute, waited = times.compute_s[rank], times.waited_s[rank]
    return RankTimes(
        rank=rank,
        host=times.hosts[rank],
        median_s=median_s,
        p90_s=statistics.quantiles(compute, n=10, method="inclusive")[-1],
        waited_share=sum(waited) / max(sum(compute) + sum(waited), 1e-9),
    )


def loop(compute_s: Times, steps: int) -> list[list[float]]:
    """The measured steps again and again, at least ``steps`` of them, whole rounds."""
    measured = len(compute_s[0])
    rounds = -(-steps // measured)
    return [list(own) * rounds for own in compute_s]


def sync_rate(compute_s: Times, samples: Sequence[float], exchange_s: float) -> float:
    """Samples per second when every step waits for everybody."""
    total_s = sum(max(column) + exchange_s for column in zip(*compute_s, strict=True))
    return float(sum(samples) * len(compute_s[0]) / total_s)


def async_rate(compute_s: Times, samples: Sequence[float], exchange_s: float) -> float:
    """Samples per second when nobody waits."""
    return sum(b * len(own) / (sum(own) + exchange_s * len(own)) for own, b in zip(compute_s, samples, strict=True))


def local_rate(compute_s: Times, samples: Sequence[float], exchange_s: float, every: int) -> float:
    """Samples per second when ranks wait for each other after every ``every`` steps."""
    steps = len(compute_s[0])
    total_s = sum(
        max(sum(own[begin : begin + every]) for own in compute_s) + exchange_s for begin in range(0, steps, every)
    )
    return sum(samples) * steps / total_s


def bounded_rate(compute_s: Times, samples: Sequence[float], exchange_s: float, max_staleness: int) -> float:
    """Samples per second when nobody is more than ``max_staleness`` steps ahead of the slowest."""
    finished: list[list[float]] = [[0.0] for _ in compute_s]
    slowest = [0.0]
    for step in range(len(compute_s[0])):
        free = slowest[max(0, step - max_staleness)]
        for own, times in zip(finished, compute_s, strict=True):
            own.append(max(own[-1], free) + times[step] + exchange_s)
        slowest.append(max(own[-1] for own in finished))
    return _rate(finished, samples)


def quorum_rate(compute_s: Times, samples: Sequence[float], exchange_s: float, quorum: int) -> float:
    """Samples per second that count, when a step closes with its first ``quorum`` gradients."""
    starts = [0.0] * len(compute_s)
    arrivals: list[list[float]] = []
    counted, closed = 0.0, 0.0
    for step in range(len(compute_s[0])):
        arrived = [start + times[step] + exchange_s for start, times in zip(starts, compute_s, strict=True)]
        arrivals.append(arrived)
        closed = max(closed, sorted(arrived)[quorum - 1])
        if step >= KEPT_AVERAGES:
            closed = max(closed, *arrivals[step - KEPT_AVERAGES])
        counted += sum(b for a, b in zip(arrived, samples, strict=True) if a <= closed)
        starts = [max(a, closed) for a in arrived]
    return counted / max(closed, 1e-9)


def sampler_shares(medians: Sequence[float], samples: Sequence[float]) -> tuple[float, ...]:
    """Shares with which all ranks would take equally long: proportional to samples per second; the smallest is 1."""
    speeds = [b / max(median, 1e-9) for b, median in zip(samples, medians, strict=True)]
    return tuple(round(speed / min(speeds), 2) for speed in speeds)


def apply_shares(compute_s: Times, samples: Sequence[float], shares: Sequence[float]) -> tuple[Times, list[float]]:
    """(times, samples) if the same samples in all were dealt out by ``shares``, and time went with samples."""
    unit = sum(samples) / sum(shares)
    dealt = [share * unit for share in shares]
    scaled = [[t * new / old for t in own] for own, new, old in zip(compute_s, dealt, samples, strict=True)]
    return scaled, dealt


def _rate(finished: Sequence[Sequence[float]], samples: Sequence[float]) -> float:
    """The rate over the second half: in the first, ranks may still be running ahead up to the bound."""
    half = (len(finished[0]) - 1) // 2
    return sum(b * (len(own) - 1 - half) / (own[-1] - own[half]) for own, b in zip(finished, samples, strict=True))
