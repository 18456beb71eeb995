"""How accurately do codecs and DiLoCo learn? At equal samples, several seeds.

python benchmarks/accuracy/run.py --study codecs|diloco [--tasks images,text] [--seeds 5] [--json FILE]
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from accuracy.studies import STUDIES, Study
from accuracy.tasks import TASKS, task_of
from accuracy.trainings import Run, train_in_ranks
from harness.command_line import at_least, parser_of, some_of
from harness.ranks import run_ranks
from harness.record import Record
from harness.tables import Table

QUICK_FRACTION = 0.03
DIVERGED = 1000.0  # nats, which is also more than any percentage


def mean_text(values: Sequence[float], places: int) -> str:
    """Mean ± standard deviation over seeds; "diverged" where a run's loss left all bounds."""
    if diverged := sum(not abs(value) < DIVERGED for value in values):
        return f"diverged ({diverged} of {len(values)})"
    spread = f" ± {statistics.stdev(values):.{places}f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{places}f}{spread}"


def table_of(study: Study, task: str, runs: Sequence[Run]) -> Table:
    """What each candidate has learnt at its end."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(run.plan.candidate, []).append(run)
    columns = ["candidate", task_of(task).measure, "loss, nats", f"loss - {study.reference}'s, same seed"]
    rows = []
    for name, own in found.items():
        others = {run.plan.seed: run.loss for run in found.get(study.reference, ())}
        differences = [run.loss - others.get(run.plan.seed, run.loss) for run in own]
        row = [name, mean_text([run.wrong for run in own], 2), mean_text([run.loss for run in own], 4)]
        row.append("" if name == study.reference else mean_text(differences, 4))
        rows.append(row)
    seeds = len({run.plan.seed for run in runs})
    title = f"{task}: {runs[0].plan.samples} samples, {seeds} seeds, mean ± standard deviation"
    return Table(title, columns, rows)


def main() -> None:
    parser = parser_of(__doc__, rounds=1, quick="one seed and 3 % of the samples")
    add = parser.add_argument
    add("--study", choices=list(STUDIES), required=True)
    add("--tasks", type=some_of(list(TASKS)), default=tuple(TASKS), help="comma-separated (default: all)")
    add("--candidates", help="separated by semicolons (default: all of the study)")
    add("--seeds", type=at_least(1), default=5, help="runs of each candidate (default: %(default)s)")
    options = parser.parse_args()
    study = STUDIES[options.study]
    names = options.candidates.split(";") if options.candidates else list(study.candidates)
    if unknown := set(names) - set(study.candidates):
        parser.error(f"--candidates: unknown {', '.join(unknown)} (expected some of {'; '.join(study.candidates)})")
    seeds, fraction = (1, QUICK_FRACTION) if options.quick else (options.seeds, 1.0)
    record = Record.begin("accuracy", study.question, options)
    plans = [
        study.plan(task, name, seed, fraction) for task in options.tasks for seed in range(seeds) for name in names
    ]
    (world_size,) = {plan.workers for plan in plans}
    runs = run_ranks(train_in_ranks, world_size, plans, deadline_s=options.deadline)[0]
    for task in options.tasks:
        record.tables.append(table_of(study, task, [run for run in runs if run.plan.task == task]))
    record.values = {"runs": [asdict(run) for run in runs]}
    record.finish()


if __name__ == "__main__":
    main()
