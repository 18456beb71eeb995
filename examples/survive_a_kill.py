"""Kill one of two workers in mid-training, and compare the weights with native DDP's. docs/elastic.md

python examples/survive_a_kill.py
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

RECIPE = str(Path(__file__).parent / "recipes" / "elastic.py")
PSENGINE = str(Path(sys.executable).with_name("psengine"))
NATIVE_RANKS = 4
EPOCHS = ("--epochs", "8")


def weights_of(what: str, command: list[str]) -> set[str]:
    """Run a training and show its output; return the digests of weights that its workers print."""
    print(f"\n{what}: {' '.join(command[1:])}", flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    print(done.stdout, end="")
    return set(re.findall(r"weights sha256 (\w+)", done.stdout))


def main() -> None:
    native = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={NATIVE_RANKS}"]
    expected = weights_of("native DDP", [*native, RECIPE, "--native", *EPOCHS])
    ours = [sys.executable, PSENGINE, "run", "--workers", "2", "--independent", "--max-restarts", "1"]
    ours += ["--strategy", f"sync:virtual_workers={NATIVE_RANKS}"]
    found = weights_of("one worker dies in step 60", [*ours, RECIPE, "--fail-at", "60", *EPOCHS])
    if found != expected or len(found) != 1:
        sys.exit(f"weights differ: native DDP with {NATIVE_RANKS} ranks {expected}, two workers with a kill {found}")
    print(f"\nweights sha256 {found.pop()[:12]}... = native DDP with {NATIVE_RANKS} ranks; faults 1")


if __name__ == "__main__":
    main()
