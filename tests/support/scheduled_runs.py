"""What ``scheduled_training.py`` wrote, and the same training under native DDP."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from support import scheduled_training
from support.hosts import ROOT
from support.processes import run_ranks

TRAINING = Path(__file__).with_name("scheduled_training.py")
DEADLINE_S = 150.0
# What launchers tell their processes. A test that runs inside a job of its own must not pass it on.
_LAUNCHERS = re.compile(r"(SLURM|OMPI|PMIX|PMI|TORCHELASTIC|MASTER|PSENGINE)_|(LOCAL_)?(RANK|WORLD_SIZE)$")


def clean_environment(**more: str) -> dict[str, str]:
    """This process's variables without those of launchers, and ``more``."""
    kept = {name: value for name, value in os.environ.items() if not _LAUNCHERS.match(name)}
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**kept, "PATH": programs, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", **more}


def lines_of(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """Worker to the steps that it reported, oldest first."""
    return {
        # The last line may be half written.
        int(path.stem.removeprefix("worker")): [json.loads(line) for line in path.read_text().split("\n")[:-1]]
        for path in sorted(folder.glob("worker*.jsonl"))
    }


def lives_of(folder: Path, worker: int, what: str = "wrapped") -> int:
    """How many processes of this worker have wrapped their model, or begun to (``what="begins"``)."""
    return len(list(folder.glob(f"{what}-{worker}-*")))


def losses_of(folder: Path) -> dict[int, list[str]]:
    """Worker to its losses, each to the bit."""
    return {worker: [line["loss"] for line in lines] for worker, lines in lines_of(folder).items()}


def hosts_of(folder: Path) -> list[str]:
    """The hosts on which workers ran, in the order of workers."""
    return [lines[-1]["host"] for _, lines in sorted(lines_of(folder).items())]


def native_losses(world_size: int, steps: int = 10) -> dict[int, list[str]]:
    """The losses of the same training under native DDP, on this machine."""
    return dict(enumerate(run_ranks(scheduled_training.native_losses, world_size, steps)))


def run(command: Sequence[str | Path], **variables: str) -> subprocess.CompletedProcess[str]:
    """Run ``command`` to its end, outside of any launcher's job."""
    return subprocess.run(
        list(map(str, command)),
        env=clean_environment(**variables),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
