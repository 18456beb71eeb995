"""How accurately do codecs, local steps and asynchronous servers learn? Seeds with their spread, at equal samples.

python benchmarks/accuracy/run.py --study codecs|diloco|staleness|dcasgd [--tasks images,text] [--seeds 5] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from accuracy.outcomes import Link, equal_samples, equal_time
from accuracy.pictures import draw
from accuracy.studies import STUDIES, Study
from accuracy.tasks import FASHION_MNIST, TASKS, task_of
from accuracy.trainings import Plan, Run, tell, train_in_ranks, train_in_turns
from accuracy.wire import compute_s, sent_bytes
from harness import pictures
from harness.command_line import at_least, parser_of, some_of
from harness.ranks import run_ranks
from harness.record import Record

from psengine.parameter_server.client.embedded import EmbeddedServer

QUICK_SHARE = 0.03


def parse_options() -> tuple[argparse.Namespace, Study]:
    parser = parser_of(__doc__, rounds=1, quick="one seed and 3 % of the samples")
    add = parser.add_argument
    add("--study", choices=list(STUDIES), required=True)
    add("--tasks", type=some_of(list(TASKS)), default=tuple(TASKS), help="comma-separated (default: all)")
    add("--candidates", help="separated by semicolons (default: all of the study)")
    add("--seeds", type=at_least(1), default=5, help="runs of each candidate (default: %(default)s)")
    add("--first-seed", type=int, default=0, help="sweeps take others than the tables (default: %(default)s)")
    add("--learning-rate", type=float, help="one for all, for sweeps (default: those in studies.py)")
    add("--keep", action="store_true", help="runs that the file of --json has already are not repeated")
    options = parser.parse_args()
    study = STUDIES[options.study]
    options.candidates = options.candidates.split(";") if options.candidates else list(study.candidates)
    if unknown := set(options.candidates) - set(study.candidates):
        parser.error(f"--candidates: unknown {', '.join(unknown)} (expected some of {'; '.join(study.candidates)})")
    if options.quick:
        options.seeds = 1
    return options, study


def plans_of(study: Study, options: argparse.Namespace) -> list[Plan]:
    """By task, seed by seed, so that an end too early leaves seeds that are complete."""
    share = QUICK_SHARE if options.quick else 1.0
    return [
        study.plan(task, name, seed, options.learning_rate, share)
        for task in options.tasks
        for seed in range(options.first_seed, options.first_seed + options.seeds)
        for name in options.candidates
    ]


def carry_out(study: Study, plans: Sequence[Plan], deadline_s: float) -> list[Run]:
    if study.in_turns:
        torch.set_num_threads(1)
        runs = []
        for plan in plans:
            runs.append(train_in_turns(plan))
            tell(runs[-1])
        return runs
    (world_size,) = {plan.workers for plan in plans}
    with EmbeddedServer.start() as server:
        environment = {"PSENGINE_SERVERS": server.addresses[0]}
        arguments = [asdict(plan) for plan in plans], "accuracy"
        found = run_ranks(train_in_ranks, world_size, *arguments, deadline_s=deadline_s, environment=environment)
        return [Run.from_json(fields) for fields in found[0]]


def kept_runs(path: Path | None, plans: Sequence[Plan]) -> list[Run]:
    if path is None or not path.exists():
        return []
    runs = [Run.from_json(fields) for fields in json.loads(path.read_text())["values"]["runs"]]
    return [run for run in runs if run.plan in plans]


def links_of(study: Study, tasks: Sequence[str]) -> Mapping[tuple[str, str], Link]:
    """By task and candidate."""
    if study.mbit is None:
        return {}
    found = {}
    (batch_size,) = {candidate.batch_size for candidate in study.candidates.values()}
    for task in tasks:
        own_s = compute_s(task_of(task), batch_size)
        for name, candidate in study.candidates.items():
            sent = sent_bytes(task_of(task), candidate.strategy, candidate.workers)
            found[task, name] = Link(sent_bytes=sent, step_s=own_s + 8 * sent / (1e6 * study.mbit))
    return found


def main() -> None:
    options, study = parse_options()
    if options.png is not None:
        pictures.require_matplotlib()  # before minutes of training
    if "images" in options.tasks and not FASHION_MNIST.is_dir():
        sys.exit(f"{FASHION_MNIST} is missing; Debian and Ubuntu: apt install dataset-fashion-mnist")
    record = Record.begin("accuracy", study.question, options)
    plans = plans_of(study, options)
    runs = kept_runs(options.json, plans) if options.keep else []
    done = [run.plan for run in runs]
    if left := [plan for plan in plans if plan not in done]:
        runs += carry_out(study, left, options.deadline)
    runs.sort(key=lambda run: plans.index(run.plan))
    links = links_of(study, options.tasks)
    for task in options.tasks:
        own = [run for run in runs if run.plan.task == task]
        record.tables.append(equal_samples(study, task_of(task), own))
        if study.mbit is not None:
            record.tables.append(equal_time(study, task_of(task), own, links))
    record.values = {"runs": [run.to_json() for run in runs]}
    record.finish(draw=lambda path: draw(study, runs, links, path))


if __name__ == "__main__":
    main()
