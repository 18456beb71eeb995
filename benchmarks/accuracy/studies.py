"""The studies: which candidates, with which rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from accuracy.trainings import Plan


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """How a strategy is trained.

    Attributes:
        rate: in the place of the study's; the best of the same sweep.
        round_steps: steps between two points at which replicas are equal.
    """

    strategy: str
    workers: int
    rate: float | None = None
    round_steps: int = 1


@dataclass(frozen=True, kw_only=True)
class Study:
    """Candidates that are compared at equal samples.

    Attributes:
        reference: the candidate that losses are compared with.
        samples: of all workers together, in a run.
        rates: by task, the best of a sweep for the reference; see the README.
    """

    question: str
    reference: str
    samples: int
    rates: Mapping[str, float]
    candidates: Mapping[str, Candidate]
    optimizer: str = "SGD"
    momentum: float = 0.0

    def plan(self, task: str, name: str, seed: int, fraction: float) -> Plan:
        """The run of a candidate with a seed; ``fraction`` of its samples, in whole rounds."""
        candidate = self.candidates[name]
        round_samples = candidate.workers * BATCH_SIZE * candidate.round_steps
        return Plan(
            task=task,
            candidate=name,
            strategy=candidate.strategy,
            workers=candidate.workers,
            batch_size=BATCH_SIZE,
            samples=max(1, int(self.samples * fraction) // round_samples) * round_samples,
            optimizer=self.optimizer,
            learning_rate=candidate.rate or self.rates[task],
            momentum=self.momentum,
            seed=seed,
        )


BATCH_SIZE = 32  # of each worker


def _codecs() -> dict[str, Candidate]:
    codecs = {"int8": "int8", "fp4": "fp4", "onebit": "onebit", "topk 1 %": "topk,ratio=0.01"}
    strategies = {"none": "sync", "bf16": "sync:compress=bf16"}
    for name, codec in codecs.items():
        strategies[name] = f"sync:compress={codec}"
        strategies[f"{name}, no feedback"] = f"sync:compress={codec},error_feedback=false"
    return {name: Candidate(strategy=strategy, workers=4) for name, strategy in strategies.items()}


def _diloco() -> dict[str, Candidate]:
    """H is how many steps a round has.

    Where successive differences agree, outer steps of rate 0.7 with momentum 0.9 move up to 7 times as far as the inner
    steps: the more, the shorter the round. So each has the best of a sweep of inner rates.
    """
    found = {"sync": Candidate(strategy="sync", workers=2)}
    for every, codec in ((1, ""), (10, ""), (50, ""), (100, ""), (500, ""), (50, "fp4"), (100, "fp4"), (500, "fp4")):
        found[f"H={every}" + (f", {codec}" if codec else "")] = Candidate(
            strategy=f"diloco:every={every}" + (f",compress={codec}" if codec else ""),
            workers=2,
            rate=3e-4 if every == 1 else 1e-3,
            round_steps=every,
        )
    return found


STUDIES = {
    "codecs": Study(
        question="What do codecs cost in accuracy, with and without error feedback?",
        reference="none",
        samples=128_000,
        rates={"images": 0.02, "text": 0.1},
        momentum=0.9,
        candidates=_codecs(),
    ),
    "diloco": Study(
        question="What do rare outer steps cost in accuracy?",
        reference="sync",
        samples=96_000,
        rates={"images": 3e-3, "text": 3e-3},
        optimizer="AdamW",
        candidates=_diloco(),
    ),
}
