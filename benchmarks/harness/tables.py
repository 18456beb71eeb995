"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.figures import Case, Spread, duration


@dataclass(frozen=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def markdown(self) -> str:
        lines = [f"**{self.title}**", ""] if self.title else []
        lines += [_line(self.columns), "|" + "---|" * len(self.columns), *map(_line, self.rows)]
        return "\n".join(lines)

    def show(self) -> None:
        print(f"{self.markdown()}\n", flush=True)


def _line(cells: Sequence[Any]) -> str:
    return f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in cells)} |"


def table_of(cases: Sequence[Case], peers: Sequence[str], baseline: str | None = None) -> Table:
    """A row for each case and candidate.

    Args:
        cases: all with the same labels.
        peers: candidates by whose time each candidate's is divided; those that no case has are left out.
        baseline: the candidate that does not exchange; adds what a candidate adds to it, and of that of the peers.
    """
    peers = [peer for peer in peers if any(peer in case.seconds for case in cases)]
    baseline = baseline if any(baseline in case.seconds for case in cases) else None
    labels = list(cases[0].labels)
    columns = [*labels, "candidate", "median (10th-90th)", "least", *(f"time ÷ {peer}'s" for peer in peers)]
    if baseline is not None:
        columns += [f"added to {baseline}", *(f"added ÷ {peer}'s" for peer in peers)]
    rows = []
    for case in cases:
        for name, seconds in case.seconds.items():
            time = Spread.of(seconds)
            row = [*(case.labels[label] for label in labels), name, time.time_text()]
            row.append(duration(time.least))
            row += [_ratio(case, name, peer) for peer in peers]
            if baseline is not None:
                own = case.overhead(name, baseline)
                row.append("-" if own is None else own.time_text())
                row += [_overhead_ratio(case, name, peer, baseline) for peer in peers]
            rows.append(row)
    return Table("", columns, rows)


def _ratio(case: Case, name: str, peer: str) -> str:
    ratio = case.ratios(name, peer)
    return "-" if name == peer or ratio is None else ratio.text()


def _overhead_ratio(case: Case, name: str, peer: str, baseline: str) -> str:
    """Of two medians: within a round the denominator may be near zero."""
    own, other = case.overhead(name, baseline), case.overhead(peer, baseline)
    return "-" if name == peer or own is None or other is None else f"{own.median / other.median:.2f}"
