"""What one run of a benchmark found, with all that a reader must know beside it; as JSON and Markdown."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness.figures import Case
from harness.machine import Load, describe_machine, sentence
from harness.tables import Table, table_of

SIGNIFICANT = 4  # digits of a time in JSON


@dataclass(kw_only=True)
class Record:
    """A run; made before it begins, closed by ``finish``.

    Attributes:
        benchmark: the folder's name.
        question: what it answers, in one line.
        peers: candidates by whose time every candidate's is divided.
        baseline: the candidate that does not exchange, if overheads over it are of interest.
        caveats: what a reader of the figures must know.
        cases: what was timed.
        tables: figures of another kind.
        values: single figures by name, for the README's table.
        failed: why there are no figures.
    """

    benchmark: str
    question: str
    peers: Sequence[str] = ()
    baseline: str | None = None
    caveats: list[str] = field(default_factory=list)
    cases: list[Case] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    command: str = ""
    date: str = ""
    machine: dict[str, Any] = field(default_factory=dict)
    load: dict[str, float] = field(default_factory=dict)
    failed: str = ""

    @classmethod
    def begin(cls, benchmark: str, question: str, options: argparse.Namespace, **more: Any) -> Record:
        """Describe the machine, and begin to measure other programs' load."""
        record = cls(
            benchmark=benchmark,
            question=question,
            command=shlex.join(["python", f"benchmarks/{benchmark}/run.py", *_without_outputs(sys.argv[1:])]),
            date=time.strftime("%Y-%m-%d"),
            machine=describe_machine(),
            **more,
        )
        record._load, record._options = Load(), options
        print(f"{record.command}\n", flush=True)
        return record

    def add(self, labels: Mapping[str, Any], seconds: Mapping[str, Sequence[float]]) -> None:
        self.cases.append(Case(labels=labels, seconds=seconds))

    def caveat(self, text: str) -> None:
        """Say it now, and beside the figures; once."""
        if text not in self.caveats:
            self.caveats.append(text)
            print(f"{text}\n", flush=True)

    def finish(self) -> None:
        """Print what was found, and write it where --json says."""
        self.load = self._load.so_far()
        for table in self.all_tables():
            table.show()
        print(sentence(self.machine, self.load), flush=True)
        if self._options.json is not None:
            self._options.json.write_text(self.to_json())

    def all_tables(self) -> list[Table]:
        groups: dict[tuple[Any, ...], list[Case]] = {}
        for case in self.cases:
            groups.setdefault(tuple(case.labels), []).append(case)
        return [*(table_of(cases, self.peers, self.baseline) for cases in groups.values()), *self.tables]

    # ---- JSON --------------------------------------------------------------------------------------------------------

    def to_json(self) -> str:
        fields = asdict(self)
        for case in fields["cases"]:
            case["seconds"] = {
                name: [float(f"{value:.{SIGNIFICANT}g}") for value in seconds]
                for name, seconds in case["seconds"].items()
            }
        return json.dumps(fields, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Record:
        fields = json.loads(text)
        fields["cases"] = [Case(**case) for case in fields["cases"]]
        fields["tables"] = [Table(**table) for table in fields["tables"]]
        return cls(**fields)


def _without_outputs(arguments: Sequence[str]) -> list[str]:
    """The command line without where its figures are written to, and without this machine's directories."""
    kept, skip = [], False
    for argument in arguments:
        if not skip and argument != "--json":
            kept.append(Path(argument).name if argument.startswith("/") else argument)
        skip = argument == "--json"
    return kept
