"""Draw some steps of a timeline file as Perfetto shows it: a process for each rank, a track for each thread.

PSENGINE_TIMELINE_STEPS=20 psengine run --workers 2 --timeline timeline.json examples/train_mlp.py
python docs/images/timeline_picture.py timeline.json --steps 10-11 --output docs/images/timeline.svg

A span inside another one is drawn below it, as Perfetto draws it. Needs matplotlib, of the extra "examples".
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

ROW_HEIGHT = 0.86
# A narrower span has no room for its name.
MIN_LABEL_SHARE = 0.035
COLOURS = {
    "forward": "#8db4e8",
    "backward": "#7cc7a2",
    "pack": "#f2c879",
    "reduce": "#c9a6e4",
    "wait": "#ef9a9a",
    "unpack": "#f2c879",
    "optimizer step": "#b8c4ce",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("timeline", type=Path, help="the file of psengine run --timeline")
    parser.add_argument("--steps", default="10-11", metavar="A-B", help="which steps (default: 10-11)")
    parser.add_argument("--output", type=Path, default=Path("timeline.svg"), metavar="PATH", help="SVG or PNG")
    options = parser.parse_args()
    first, _, last = options.steps.partition("-")
    draw(json.loads(options.timeline.read_text())["traceEvents"], range(int(first), int(last or first) + 1), options)


def draw(events: list[dict], steps: range, options: argparse.Namespace) -> None:
    """Write the picture; every span of these steps is in it, at its time."""
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [e for e in events if e["ph"] == "X" and e["args"].get("step") in steps]
    if not spans:
        raise SystemExit(f"{options.timeline} has no span of steps {options.steps}")
    begin_us = min(e["ts"] for e in spans)
    length_ms = max(e["ts"] + e["dur"] - begin_us for e in spans) / 1000
    rows, labels, boundaries = [], [], []
    for process, thread in sorted({(e["pid"], e["tid"]) for e in spans}):
        own = sorted(
            (e for e in spans if (e["pid"], e["tid"]) == (process, thread)), key=lambda e: (e["ts"], -e["dur"])
        )
        if boundaries and boundaries[-1][0] != process:
            rows.append([])
            labels.append("")
        boundaries.append((process, len(rows)))
        nested = nest(own)
        labels += [f"rank {process}  {tracks[process, thread]}"] + [""] * (len(nested) - 1)
        rows += nested
    figure, axes = pyplot.subplots(figsize=(11, 0.42 * len(rows) + 0.9), facecolor="white")
    for row, spans_of_row in enumerate(rows):
        for span in spans_of_row:
            left, width = (span["ts"] - begin_us) / 1000, span["dur"] / 1000
            colour = COLOURS.get(span["name"], "#d9dee3")
            axes.barh(row, width, left=left, height=ROW_HEIGHT, color=colour, edgecolor="white", linewidth=0.4)
            if width >= MIN_LABEL_SHARE * length_ms:
                axes.text(left + width / 2, row, span["name"], ha="center", va="center", fontsize=8, clip_on=True)
    axes.set_yticks(range(len(rows)), labels)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlim(0, length_ms)
    axes.set_xlabel(f"milliseconds since the first span of step {steps[0]}")
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    # A fixed date and salt: the same file gives the same picture.
    matplotlib.rcParams["svg.hashsalt"] = "timeline"
    metadata = {"Date": None} if options.output.suffix == ".svg" else None
    figure.savefig(options.output, metadata=metadata)


def nest(spans: list[dict]) -> list[list[dict]]:
    """Rows of spans: one that begins inside another stands in a lower row."""
    rows: list[list[dict]] = []
    for span in spans:
        for row in rows:
            if not row or row[-1]["ts"] + row[-1]["dur"] <= span["ts"]:
                row.append(span)
                break
        else:
            rows.append([span])
    return rows


if __name__ == "__main__":
    main()
