"""``make bench``: every benchmark in turn, about ten minutes on two cores; then RESULTS.md, of the records alone.

Those on several hosts need root and long: they run by name only, ``make bench
BENCH=cluster,cluster_fast,cluster_slow,cluster_resnet,cluster_far``.

python benchmarks/harness/suite.py [--only all_reduce,straggler] [--quick] [--out DIRECTORY] [--ps-lite PATH]
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.command_line import some_of
from harness.machine import sentence
from harness.ranks import BENCHMARKS
from harness.record import Record

HEAD = """# Results

Written by `make bench`; do not edit. Each section has its command, machine, load and caveats. Times are medians over
rounds, with the 10th and 90th percentile; a ratio is the median of the ratios within a round. "Added to plain" is what
a candidate adds to the step that exchanges nothing; a ratio of two such times is the ratio of their medians. On a
machine that is not calm, compare ratios only.
"""
QUICK_OUT = BENCHMARKS.parent / "build" / "bench"


@dataclass(frozen=True)
class Entry:
    """A run of a benchmark; ``limit_s`` ends one that hangs."""

    folder: str
    arguments: str = ""
    limit_s: float = 240


THREE = "--candidates plain,native,psengine"
SERVERS = "--candidates plain,native,sync-server,async --optimizer SGD"
SHARDED = "--candidates plain,native,psengine,sharded --optimizer AdamW,momentum"
CODECS = ("bf16", "int8", "fp4", "onebit", "topk,ratio=0.01")
CODED = ";".join(f"sync:compress={codec}" for codec in CODECS)
LOCAL = "local:every=16;local:every=16,compress=bf16;diloco:every=16,compress=fp4"
HOSTS = f"none;native;sync;hierarchical;sync-server;sync-server:compress=int8;{CODED};{LOCAL}"
FAR = "none;native;sync:compress=int8;diloco:every=100;diloco:every=100,compress=fp4"
SUITE = {
    "step_overhead": Entry("step_overhead", "--rounds 25"),
    "step_overhead_servers": Entry("step_overhead", f"--models mlp,gpt --ranks 2 --rounds 15 {SERVERS}"),
    "step_overhead_cuda": Entry("step_overhead", f"--models gpt,cnn --ranks 1 --device cuda {THREE}"),
    "step_overhead_sharded": Entry("step_overhead", f"--models mlp --ranks 2 --rounds 20 {SHARDED}"),
    "all_reduce": Entry("all_reduce", "--rounds 20"),
    "server_throughput": Entry("server_throughput", "--rounds 15", limit_s=400),
    "tables": Entry("tables", "--plot docs/images/tables.png", limit_s=900),
    "straggler": Entry("straggler", "--candidates native,sync,async --rounds 1 --seconds 20"),
    "start_up": Entry("start_up"),
    "codecs": Entry("codecs"),
    "fusion_cuda": Entry("fusion_cuda"),
    "cluster": Entry("cluster", f"--rates 1gbit --rounds 3 --candidates '{HOSTS}'", limit_s=1800),
    "cluster_fast": Entry("cluster", f"--rates 10gbit --rounds 2 --candidates '{HOSTS}'", limit_s=1800),
    "cluster_slow": Entry("cluster", f"--rates 100mbit --rounds 1 --warm-up 1 --candidates '{HOSTS}'", limit_s=2400),
    "cluster_resnet": Entry(
        "cluster",
        "--models cnn --layouts 4x1 --rates 100mbit --rounds 1 --warm-up 1"
        f" --candidates 'none;native;sync;sync-server;{CODED}'",
        limit_s=600,
    ),
    "cluster_far": Entry(
        "cluster",
        "--models gpt --layouts 2x1 --rates 10mbit --round-trip-ms 20 --rounds 1 --warm-up 1"
        f" --candidates '{FAR}' --deadline 900",
        limit_s=960,
    ),
}
BY_NAME_ONLY = tuple(name for name in SUITE if name.startswith("cluster") or name.endswith("cuda"))


def run(name: str, entry: Entry, options: argparse.Namespace) -> str:
    """Run one; return why it failed, or an empty string. What it would have written is then said to be missing."""
    folder = options.out / "results"
    folder.mkdir(parents=True, exist_ok=True)
    json_path = folder / f"{name}.json"
    json_path.unlink(missing_ok=True)
    command = [sys.executable, str(BENCHMARKS / entry.folder / "run.py"), *shlex.split(entry.arguments)]
    command += ["--json", str(json_path)]
    command += ["--quick"] if options.quick else []
    if options.ps_lite is not None and entry.folder == "server_throughput":
        command += ["--ps-lite", str(options.ps_lite)]
    try:
        code = subprocess.run(command, timeout=entry.limit_s, check=False).returncode  # ranks end with their launcher
        failed = f"exit code {code}; its error is in the output of make bench" if code else ""
    except subprocess.TimeoutExpired:
        failed = f"not finished within {entry.limit_s:g} s"
    if failed:
        said = shlex.join(["python", f"benchmarks/{entry.folder}/run.py", *shlex.split(entry.arguments)])
        date = time.strftime("%Y-%m-%d")
        record = Record(benchmark=entry.folder, question="", command=said, date=date, failed=failed)
        json_path.write_text(record.to_json())
    return failed


def write_results(out: Path, names: list[str]) -> None:
    """Write RESULTS.md into ``out``, of the records in its folder ``results``: those named first, in that order."""
    records = {path.stem: Record.from_json(path.read_text()) for path in sorted((out / "results").glob("*.json"))}
    ordered = {name: records[name] for name in [*names, *records] if name in records}
    parts = [HEAD]
    for name, record in ordered.items():
        parts += [f"## {name}: {record.question}\n", f"{record.date}. `{record.command}`\n"]
        if record.failed:
            parts.append(f"**No figures: {record.failed}**\n")
            continue
        parts.append(sentence(record.machine, record.load) + "\n")
        parts += [f"- {caveat}" for caveat in record.caveats]
        if record.caveats:
            parts.append("")
        parts += [table.markdown() + "\n" for table in record.all_tables()]
    (out / "RESULTS.md").write_text("\n".join(parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    by_default = tuple(name for name in SUITE if name not in BY_NAME_ONLY)
    parser.add_argument("--only", type=some_of(list(SUITE)), default=by_default, help="comma-separated")
    parser.add_argument("--quick", action="store_true", help=f"few rounds, noisy; into {QUICK_OUT}")
    parser.add_argument("--out", type=Path, help=f"where RESULTS.md and results/ go (default: {BENCHMARKS})")
    parser.add_argument("--ps-lite", type=Path, metavar="PATH", help="a checkout of ps-lite, to compare with")
    parser.add_argument("--write", action="store_true", help="measure nothing: write RESULTS.md of the records again")
    options = parser.parse_args()
    options.out = (options.out or (QUICK_OUT if options.quick else BENCHMARKS)).resolve()
    begin_s, outcomes = time.monotonic(), {}
    for name in () if options.write else options.only:
        entry_s = time.monotonic()
        print(f"\n==== {name}\n", flush=True)
        outcomes[name] = run(name, SUITE[name], options)
        print(f"\n==== {name}: {time.monotonic() - entry_s:.0f} s {outcomes[name]}", flush=True)
    write_results(options.out, list(SUITE))
    print(f"\n{time.monotonic() - begin_s:.0f} s in all; {options.out / 'RESULTS.md'}")
    if failed := {name: why for name, why in outcomes.items() if why}:
        sys.exit("\n".join(f"FAILED: {name}: {why}" for name, why in failed.items()))


if __name__ == "__main__":
    main()
