"""Fits the model of a step's time to measured steps, and compares it with steps on layouts that it has not seen.

python benchmarks/cluster/step_time.py --fit 2x1.json,4x1.json --check 8x1.json

The files are those of ``run.py --json``. The model is ``psengine/cli/advising/step_model.py``; ``psengine advise``
uses it with the constants that this program prints.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.record import Record
from harness.tables import Table
from step_overhead.models import WORKLOADS

from psengine.cli.advising.coding_speed import coding_of
from psengine.cli.advising.scale import CONSTANTS
from psengine.cli.advising.step_model import Constants, Network, Road, step_s
from psengine.cli.advising.traffic import HIERARCHICAL, PLAIN, Coding, codec_of, traffic

NONE, NATIVE = "none", "native"
# torch's own hooks are no strategy of psengine.
LEFT_OUT = ("native-fp16",)
UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
# The search begins here, and ends where changing one of them by a thousandth gains nothing.
START = {
    "ring efficiency": 0.95,
    "gathers efficiency": 0.95,
    "servers efficiency": 0.95,
    "gloo host_s": 1e-9,
    "servers host_s": 1e-9,
    "operation_s": 1e-3,
    "value_s": 3e-10,
}
FIRST_FACTOR, LAST_FACTOR = 1.6, 1.001


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A candidate's step: that of the fastest round, because other programs only lengthen it."""

    labels: Mapping[str, str]
    candidate: str
    seconds: float
    compute_s: float
    value_bytes: int
    network: Network
    coding: Coding

    def predicted_s(self, constants: Constants) -> float:
        strategy = "sync" if self.candidate == NATIVE else self.candidate
        cost = traffic(strategy, self.network.hosts, self.network.ranks_per_host, self.coding)
        return step_s(cost, self.value_bytes, self.compute_s, self.network, constants)


@cache
def shapes_of(model: str) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(parameter.shape) for parameter in WORKLOADS[model].build().parameters())


@cache
def coding_for(candidate: str, model: str) -> Coding:
    codec = None if candidate in (NATIVE, HIERARCHICAL) else codec_of(candidate)
    return PLAIN if codec is None else coding_of(codec, shapes_of(model))


def bytes_per_s(rate: str) -> float:
    """Of a rate as tc(8) takes it, such as "1gbit"."""
    match = re.fullmatch(r"([\d.]+)([kmg]bit)", rate)
    if match is None:
        raise SystemExit(f"a rate is written as 100mbit or 1gbit, got {rate}")
    return float(match[1]) * UNITS[match[2]] / 8


def read(paths: Sequence[Path]) -> list[Measured]:
    """Every candidate of the records but the one without exchange, which is each case's time of computing."""
    found = []
    for path in paths:
        record = Record.from_json(path.read_text())
        for case in record.cases:
            model = case.labels["model"]
            hosts, ranks = (int(number) for number in case.labels["hosts x ranks"].split(" x "))
            network = Network(
                hosts=hosts,
                ranks_per_host=ranks,
                bytes_per_s=bytes_per_s(case.labels["link"]),
                round_trip_s=float(case.labels.get("round trip", "0").split()[0]) / 1000,
                # Emulated hosts share the cores of one machine, or what other programs leave of them.
                sharing=max(1.0, hosts * ranks / (record.machine["cores"] * (1 - record.load["others"]))),
            )
            found += [
                Measured(
                    labels=case.labels,
                    candidate=candidate,
                    seconds=min(seconds),
                    compute_s=min(case.seconds[NONE]),
                    value_bytes=4 * sum(math.prod(shape) for shape in shapes_of(model)),
                    network=network,
                    coding=coding_for(candidate, model),
                )
                for candidate, seconds in case.seconds.items()
                if candidate != NONE and candidate not in LEFT_OUT
            ]
    return found


def constants_of(values: Mapping[str, float]) -> Constants:
    return Constants(
        ring=Road(efficiency=values["ring efficiency"], host_s=values["gloo host_s"]),
        gathers=Road(efficiency=values["gathers efficiency"], host_s=values["gloo host_s"]),
        servers=Road(efficiency=values["servers efficiency"], host_s=values["servers host_s"]),
        operation_s=values["operation_s"],
        value_s=values["value_s"],
        message_s=CONSTANTS.message_s,
    )


def fitted(measured: Sequence[Measured]) -> Constants:
    """The constants with the least sum of |log(predicted / measured)|, which outliers do not pull."""

    def loss(values: Mapping[str, float]) -> float:
        constants = constants_of(values)
        return sum(abs(math.log(one.predicted_s(constants) / one.seconds)) for one in measured)

    best, factor = dict(START), FIRST_FACTOR
    least = loss(best)
    while factor > LAST_FACTOR:
        before = least
        for name in START:
            for scale in (factor, 1 / factor):
                value = best[name] * scale
                tried = {**best, name: min(1.0, value) if name.endswith("efficiency") else value}
                if (found := loss(tried)) < least:
                    best, least = tried, found
        if least == before:
            factor = math.sqrt(factor)
    return constants_of(best)


def table_of(title: str, measured: Sequence[Measured], constants: Constants) -> Table:
    rows = []
    for one in measured:
        predicted_s = one.predicted_s(constants)
        milliseconds = [f"{1e3 * seconds:.0f}" for seconds in (one.compute_s, one.seconds, predicted_s)]
        rows.append([*one.labels.values(), one.candidate, *milliseconds, f"{predicted_s / one.seconds:.2f}"])
    ratios = [float(row[-1]) for row in rows]
    within = sum(1 / 1.1 <= ratio <= 1.1 for ratio in ratios)
    columns = [*measured[0].labels, "candidate", "compute, ms", "measured, ms", "predicted, ms", "predicted ÷ measured"]
    return Table(f"{title}: {within} of {len(rows)} within 10 %, {min(ratios):.2f} to {max(ratios):.2f}", columns, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])

    def files(text: str) -> list[Path]:
        return [Path(part) for part in text.split(",")]

    parser.add_argument("--fit", type=files, metavar="A.json,B.json", help="default: psengine advise's constants")
    parser.add_argument("--check", type=files, default=[], metavar="C.json")
    options = parser.parse_args()
    seen, unseen = read(options.fit or []), read(options.check)
    constants = fitted(seen) if seen else CONSTANTS
    for title, measured in (("seen", seen), ("not seen", unseen)):
        if measured:
            table_of(title, measured, constants).show()
    print(asdict(constants))


if __name__ == "__main__":
    main()
