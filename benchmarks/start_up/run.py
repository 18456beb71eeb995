"""How long it takes to begin: to import psengine, to show its help, to reach the first step of a launched training.

python benchmarks/start_up/run.py [--quick] [--what import,help]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from harness.command_line import parser_of, some_of
from harness.record import Record
from harness.turns import Turn, take_turns

QUESTION = "How long does it take to begin?"
WARM_UP_ROUNDS = 1  # the files are in the page cache then
DEADLINE_S = 60
BIN = Path(sys.executable).parent
# A training step of each rank; rank 0 writes when it was done.
FIRST_STEP = """
import sys, time, pathlib, torch, torch.distributed as dist
torch.set_num_threads(1)
dist.init_process_group("gloo")
module = torch.nn.Linear(64, 8)
optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
if sys.argv[1] == "native":
    model = torch.nn.parallel.DistributedDataParallel(module)
else:
    import psengine
    model = psengine.DistributedDataParallel(module)
    optimizer = psengine.DistributedOptimizer(optimizer, model)
model(torch.randn(4, 64)).sum().backward()
optimizer.step()
if dist.get_rank() == 0:
    pathlib.Path(sys.argv[2]).write_text(str(time.monotonic()))
dist.barrier()
dist.destroy_process_group()
"""


def program(*command: object) -> Turn:
    """A process, from its start to its end."""
    return Turn(lambda: _run(*command))


def first_step(which: str, folder: Path, *command: object) -> Turn:
    """A launched training, from the launcher's start to the end of rank 0's first step; its end is waited for."""
    script, out = folder / "first_step.py", folder / "moment"
    script.write_text(FIRST_STEP)

    def run() -> float:
        _run(*command, script, which, out)
        return float(out.read_text())

    return Turn(run)


def _run(*command: object) -> None:
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(map(str, command))} ended with exit code {done.returncode}: {done.stderr[-2000:]}"
        )


def clock(run: Callable[[], object]) -> float:
    """Seconds until a call ends, or until the moment that it returns."""
    begin_s = time.monotonic()
    end_s = run()
    return (end_s if isinstance(end_s, float) else time.monotonic()) - begin_s


def turns_of(what: str, folder: Path) -> dict[str, Turn]:
    launch, psengine = ("--nproc-per-node", 2), (sys.executable, "-m", "psengine.cli.main")
    with_server, python = ("--workers", 2, "--strategy", "async"), (sys.executable, "-c")
    return {
        "import": {
            "Python": program(*python, "pass"),
            "torch": program(*python, "import torch"),
            "psengine": program(*python, "import torch, psengine"),
            "psengine, its DDP": program(
                sys.executable, "-c", "import torch, psengine; psengine.DistributedDataParallel"
            ),
        },
        "help": {
            "psengine": program(*psengine, "--help"),
            "psengine run": program(*psengine, "run", "--help"),
            "psengine-server": program(sys.executable, "-m", "psengine.cli.server", "--help"),
            "torchrun": program(BIN / "torchrun", "--help"),
        },
        "first step": {
            "torchrun": first_step("native", folder, BIN / "torchrun", *launch),
            "psengine run": first_step("psengine", folder, *psengine, "run", *launch),
            "psengine run, 1 server": first_step("psengine", folder, *psengine, "run", *with_server),
        },
    }[what]


def main() -> None:
    parser = parser_of(__doc__, rounds=7, quick="2 rounds")
    parts = ("import", "help", "first step")
    parser.add_argument("--what", type=some_of(parts), default=parts, help="comma-separated")
    options = parser.parse_args()
    rounds = min(2, options.rounds) if options.quick else options.rounds
    record = Record.begin("start_up", QUESTION, options, peers=("torch", "torchrun"))
    record.caveat("The processes' files are in the page cache: a first start after boot takes longer.")
    with tempfile.TemporaryDirectory() as directory:
        for what in options.what:
            turns = turns_of(what, Path(directory))
            record.add({"what": what}, take_turns(turns, rounds, warm_up=WARM_UP_ROUNDS, clock=clock))
    record.finish()


if __name__ == "__main__":
    main()
