"""Kill one of two workers in mid-training, and compare the weights with native DDP's. docs/elastic.md

python examples/survive_a_kill.py
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

RECIPE = str(Path(__file__).parent / "recipes" / "elastic.py")
PSENGINE = str(Path(sys.executable).with_name("psengine"))
NATIVE_RANKS = 4
EPOCHS = ("--epochs", "8")
FAIL_AT = 60


def output_of(what: str, command: list[str]) -> str:
    """Run a training and show its output."""
    print(f"\n{what}: {' '.join(command[1:])}", flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    print(done.stdout, end="")
    return done.stdout


def weights_in(output: str) -> set[str]:
    """The digests of weights that workers print."""
    return set(re.findall(r"weights sha256 (\w+)", output))


def main() -> None:
    native = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NATIVE_RANKS}"]
    expected = weights_in(output_of("native DDP", [*native, RECIPE, "--native", *EPOCHS]))
    ours = [sys.executable, PSENGINE, "run", "--workers", "2", "--independent", "--max-restarts", "1"]
    ours += ["--strategy", f"sync:virtual_workers={NATIVE_RANKS}", RECIPE, "--fail-at", str(FAIL_AT), *EPOCHS]
    with tempfile.TemporaryDirectory() as directory:
        hold = ["--hold", f"{directory}/hold"]  # the other worker does not end before the killed one is back
        output = output_of(f"one worker dies in step {FAIL_AT}", [*ours, *hold])
    found = weights_in(output)
    if found != expected or len(found) != 1:
        sys.exit(f"weights differ: native DDP with {NATIVE_RANKS} ranks {expected}, two workers with a kill {found}")
    # The first process of worker 1 is killed before it could print this.
    again = re.search(r"worker 1: process \d+ trained in steps (\d+) to (\d+)", output)
    if again is None or int(again[1]) <= FAIL_AT:
        sys.exit(f"worker 1 did not come back (expected a process that trained after step {FAIL_AT}, got {again})")
    print(f"\nworker 1, killed in step {FAIL_AT}, came back and trained in steps {again[1]} to {again[2]}")
    print(f"weights sha256 {found.pop()[:12]}... = native DDP with {NATIVE_RANKS} ranks; faults 1")


if __name__ == "__main__":
    main()
