"""What was run of which sources: a line of ``runs.tsv`` for each run, so that slices of seeds add up."""

from __future__ import annotations

import ast
import csv
import hashlib
import sys
from dataclasses import astuple, dataclass, fields
from pathlib import Path

FILE = Path(__file__).with_name("runs.tsv")
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Record:
    """A run: ``seeds`` many, from ``first`` on."""

    date: str
    sources: str
    first: int
    seeds: int
    failures: int


def recorded() -> list[Record]:
    """All runs that the file has."""
    if not FILE.exists():
        return []
    with FILE.open(newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t"))
    return [
        Record(row["date"], row["sources"], int(row["first"]), int(row["seeds"]), int(row["failures"])) for row in rows
    ]


def append(record: Record) -> None:
    """Add a run to the file."""
    is_new = not FILE.exists()
    with FILE.open("a", newline="") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        if is_new:
            writer.writerow(one.name for one in fields(Record))
        writer.writerow(astuple(record))


def seeds_of(records: list[Record], sources: str) -> int:
    """How many were run of these sources, each counted once."""
    return len({seed for one in records if one.sources == sources for seed in range(one.first, one.first + one.seeds)})


def next_seed(records: list[Record], sources: str) -> int:
    """After all that were run of these sources."""
    return max((one.first + one.seeds for one in records if one.sources == sources), default=0)


def sources_digest() -> str:
    """Of all modules of this repository that are loaded, without comments and docstrings, and of the native sources."""
    digest = hashlib.sha256()
    loaded = {Path(module.__file__).resolve() for module in sys.modules.values() if getattr(module, "__file__", None)}
    ours = [path.relative_to(ROOT) for path in loaded if path.suffix == ".py" and path.is_relative_to(ROOT)]
    for path in sorted(path for path in ours if path.parts[0] in ("psengine", "tests")):
        tree = ast.parse((ROOT / path).read_text())
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
                del node.body[0]
        digest.update(f"{path} {ast.dump(tree)}".encode())
    for path in sorted(ROOT.glob("csrc/**/*.[chi]*")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
