"""The four studies: which candidates, with which rates, and what papers found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from accuracy.trainings import Plan


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a task is trained in a study, by every candidate alike.

    Attributes:
        samples: of all workers together, in a run.
        learning_rate: the best of a sweep for the study's reference; README.
    """

    samples: int
    learning_rate: float
    optimizer: str = "SGD"
    momentum: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """See ``Plan`` for the options.

    Attributes:
        learning_rates: by task, in the place of the study's; the best of the same sweep.
        paper: what a paper found, in its own experiment.
    """

    strategy: str
    workers: int
    batch_size: int
    learning_rates: Mapping[str, float] = field(default_factory=dict)
    round_steps: int = 1
    dropped: float = 0.0
    paper: str = ""


@dataclass(frozen=True, kw_only=True)
class Study:
    """Candidates that learn from equally many samples.

    Attributes:
        in_turns: workers take turns in one process, against real servers; else they are ranks of a process group.
        reference: the candidate that others are compared with.
        settings: by task.
        paper: what the papers' column says, and where it is from.
        mbit: the rate of the links that the time of a step is modelled for; None: no such table.
        panels: which candidates' curves are drawn in one panel; by title.
        draws_loss: else percent of wrong answers, which stay in bounds where the loss does not.
    """

    question: str
    in_turns: bool = False
    reference: str
    settings: Mapping[str, Setting]
    candidates: Mapping[str, Candidate]
    paper: str
    mbit: float | None = None
    panels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    draws_loss: bool = True

    def plan(self, task: str, name: str, seed: int, learning_rate: float | None, share: float) -> Plan:
        """The run of a candidate with a seed; ``share`` of its samples, in whole rounds."""
        candidate, setting = self.candidates[name], self.settings[task]
        batch_size = candidate.batch_size
        round_samples = candidate.workers * batch_size * candidate.round_steps
        if learning_rate is None:
            learning_rate = candidate.learning_rates.get(task, setting.learning_rate)
        return Plan(
            task=task,
            candidate=name,
            strategy=candidate.strategy,
            workers=candidate.workers,
            batch_size=batch_size,
            samples=max(1, int(setting.samples * share) // round_samples) * round_samples,
            optimizer=setting.optimizer,
            learning_rate=learning_rate,
            momentum=setting.momentum,
            seed=seed,
            round_steps=candidate.round_steps,
            dropped=candidate.dropped,
        )


# ---- codecs ----------------------------------------------------------------------------------------------------------

PLAIN = "none"
BIASED = {
    "int8": "int8",
    "fp4": "fp4",
    "onebit": "onebit",
    "topk 1 %": "topk,ratio=0.01",
    "powersgd rank 4": "powersgd,rank=4",
}
BYTEPS = {PLAIN: ".7138, 518 s", "onebit": ".7056, 195 s", "topk 1 %": ".7042, 84 s"}
WITHOUT = ", no feedback"


def _codecs() -> dict[str, Candidate]:
    strategies = {PLAIN: "sync", "bf16": "sync:compress=bf16"}
    for name, codec in BIASED.items():
        strategies[name] = f"sync:compress={codec}"
        strategies[name + WITHOUT] = f"sync:compress={codec},error_feedback=false"
    return {
        name: Candidate(strategy=strategy, workers=4, batch_size=32, paper=BYTEPS.get(name, ""))
        for name, strategy in strategies.items()
    }


# ---- DiLoCo ----------------------------------------------------------------------------------------------------------

# Where successive differences agree, outer steps of rate 0.7 with momentum 0.9 move up to 7 times as far as the inner
# steps: the more, the shorter the round. So each has the best of a sweep of inner rates: H -> by task.
INNER_RATES: Mapping[int, Mapping[str, float]] = {
    1: {"images": 3e-4, "text": 3e-4},
    **{every: {"images": 1e-3, "text": 1e-3} for every in (10, 50, 100, 500)},
}
ENCODED = (50, 100, 500)
DROP_ROUND = 50
TORCHFT = {"sync": "1.677", "H=50": "1.756", "H=100": "1.783", "H=500": "1.836"}


def _diloco() -> dict[str, Candidate]:
    def candidate(strategy: str, every: int = 1, dropped: float = 0.0, paper: str = "") -> Candidate:
        return Candidate(
            strategy=strategy,
            workers=2,
            batch_size=32,
            learning_rates=INNER_RATES[every] if strategy != "sync" else {},
            round_steps=every,
            dropped=dropped,
            paper=paper,
        )

    servers = f"diloco-server:quorum=2,every={DROP_ROUND}"
    return {
        "sync": candidate("sync", paper=TORCHFT["sync"]),
        **{f"H={e}": candidate(f"diloco:every={e}", e, paper=TORCHFT.get(f"H={e}", "")) for e in INNER_RATES},
        **{f"H={e}, fp4": candidate(f"diloco:every={e},compress=fp4", e) for e in ENCODED},
        f"H={DROP_ROUND}, servers": candidate(servers, DROP_ROUND),
        f"H={DROP_ROUND}, servers, half dropped": candidate(servers, DROP_ROUND, 0.5, "2.1 % more (perplexity)"),
    }


# ---- staleness -------------------------------------------------------------------------------------------------------

WORKERS, LEARNERS_BATCH = 30, 4


def _staleness() -> dict[str, Candidate]:
    def candidate(workers: int, options: str, paper: str) -> Candidate:
        # Of an update: WORKERS / workers learners' batches, so that a run has equally many samples.
        batch_size = LEARNERS_BATCH * WORKERS // workers
        return Candidate(strategy=f"async{options}", workers=workers, batch_size=batch_size, paper=paper)

    scaled = ":staleness_scaling=inverse"
    return {
        "hardsync": candidate(1, "", "18 %"),
        "staleness 15, fixed rate": candidate(15, "", "90 %"),
        "staleness 30, fixed rate": candidate(30, "", "90 %"),
        "staleness 15, rate ÷ staleness": candidate(15, scaled, "near 18 %"),
        "staleness 30, rate ÷ staleness": candidate(30, scaled, "near 18 %"),
    }


# ---- delay compensation ----------------------------------------------------------------------------------------------

# The paper's, of its constant strength and of its adaptive one.
STRENGTH, DECAY = 2.0, 0.95


def _dcasgd() -> dict[str, Candidate]:
    found = {"sequential SGD": Candidate(strategy="async", workers=1, batch_size=32, paper="8.65 %")}
    constant = f":delay_compensation={STRENGTH:g}"
    for workers, plain, compensated in ((4, "9.27 %", "8.19 %"), (16, "", "")):
        for name, options, paper in (
            ("ASGD", "", plain),
            ("DC-ASGD, constant", constant, ""),
            ("DC-ASGD, adaptive", f"{constant},compensation_decay={DECAY:g}", compensated),
        ):
            found[f"{name}, {workers} workers"] = Candidate(
                strategy=f"async{options}", workers=workers, batch_size=32, paper=paper
            )
    return found


# ---- all -------------------------------------------------------------------------------------------------------------

STUDIES = {
    "codecs": Study(
        question="What do codecs cost in accuracy, with and without error feedback?",
        reference=PLAIN,
        settings={
            "images": Setting(samples=128_000, learning_rate=0.02, momentum=0.9),
            "text": Setting(samples=128_000, learning_rate=0.1, momentum=0.9),
        },
        candidates=_codecs(),
        paper="BytePS: accuracy and time, ResNet-18 on CIFAR-100, 100 Mbit/s",
        mbit=100.0,
        panels={
            "with error feedback": (PLAIN, "bf16", *BIASED),
            "without": (PLAIN, "bf16", *(name + WITHOUT for name in BIASED)),
        },
    ),
    "diloco": Study(
        question="What do rare outer steps cost in accuracy?",
        reference="sync",
        settings={
            "images": Setting(samples=96_000, learning_rate=3e-3, optimizer="AdamW"),
            "text": Setting(samples=96_000, learning_rate=3e-3, optimizer="AdamW"),
        },
        candidates=_diloco(),
        paper="a torchft run: loss of 51 M parameters on TinyStories; the last: DiLoCo (arXiv 2311.08105)",
        panels={
            "rounds of H steps": ("sync", *(f"H={every}" for every in INNER_RATES)),
            "outer gradients as fp4": ("sync", *(f"H={every}{how}" for every in ENCODED for how in ("", ", fp4"))),
            "half of the messages dropped": (
                "sync",
                f"H={DROP_ROUND}",
                f"H={DROP_ROUND}, servers",
                f"H={DROP_ROUND}, servers, half dropped",
            ),
        },
    ),
    "staleness": Study(
        question="Does a rate divided by the staleness repair asynchronous SGD?",
        in_turns=True,
        reference="hardsync",
        settings={
            "images": Setting(samples=24_000, learning_rate=0.2),
            "text": Setting(samples=24_000, learning_rate=1.0),
        },
        candidates=_staleness(),
        paper="arXiv 1511.05950, figure 3: test error, CIFAR-10, 30 learners",
        draws_loss=False,
    ),
    "dcasgd": Study(
        question="How near does delay compensation bring asynchronous SGD to sequential SGD?",
        in_turns=True,
        reference="sequential SGD",
        settings={
            "images": Setting(samples=64_000, learning_rate=0.2),
            "text": Setting(samples=64_000, learning_rate=0.5),
        },
        candidates=_dcasgd(),
        paper="arXiv 1609.08326, table 1: test error, ResNet-20 on CIFAR-10, 4 workers",
    ),
}
