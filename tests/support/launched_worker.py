"""What cli/test_run.py launches; without torch, so that it starts at once. Its first argument says how it ends."""

import ctypes
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path

NAMES = ("RANK", "PSENGINE_WORKER", "PSENGINE_WORKERS", "WORLD_SIZE", "PSENGINE_STRATEGY", "PSENGINE_SERVERS")
NAMES += ("OMP_NUM_THREADS",)
FOREIGN = ("SLURM_STEP_ID", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK")


def main() -> None:
    end = sys.argv[1]
    rank = int(os.environ.get("RANK") or os.environ.get("PSENGINE_WORKER", "0"))
    foreign = [name for name in FOREIGN if name in os.environ]
    variables = [*(f"{name}={os.environ.get(name)}" for name in NAMES), f"foreign={foreign}"]
    print(f"worker {rank} has {sys.argv[2:]}", *variables, flush=True)
    if end == "grandchildren":
        leave_behind(rank)
        hang()
    elif end == "raise-and-leave":
        if rank > 0:
            leave_behind(rank)
            raise ValueError("bad data")
        hang()
    elif end == "save":
        try:
            hang()
        except KeyboardInterrupt:
            traceback.print_exc()
            while not Path(sys.argv[2]).exists():
                time.sleep(0.01)
            print("checkpoint saved", file=sys.stderr, flush=True)
            raise
    elif end == "fail-once":
        if mark_life(rank) == 1 and rank == 1:
            while not (Path(sys.argv[2]) / "lives-0").exists():  # rank 0 has said what it has
                time.sleep(0.01)
            sys.exit("not yet")
    elif end == "fail-once-and-for-good":
        if rank == 3 or (rank == 1 and mark_life(rank) == 1):
            sys.exit("not yet")
    elif end == "hang" or (end != "well" and rank == 0):
        hang()
    elif end == "raise":
        try:
            print({}["weights"])
        except KeyError as error:
            raise ValueError("bad checkpoint") from error
    elif end == "exit":
        sys.exit(7)
    elif end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif end == "segfault":
        ctypes.string_at(0)


def hang() -> None:
    """Until somebody ends this process: the test, by the launcher, or the launcher's own end."""
    launcher = os.getppid()
    while os.getppid() == launcher:
        time.sleep(0.1)


def leave_behind(rank: int) -> None:
    """A child in this process's group, another that left it; none of us listens to reason."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    children = [subprocess.Popen(sleep), subprocess.Popen(sleep, start_new_session=True)]
    pids = " ".join(str(pid) for pid in (os.getpid(), *(child.pid for child in children)))
    written = Path(sys.argv[2]) / f"pids-{rank}"
    written.with_suffix(".new").write_text(pids)
    written.with_suffix(".new").rename(written)


def mark_life(rank: int) -> int:
    """Which life of this rank it is."""
    file = Path(sys.argv[2]) / f"lives-{rank}"
    with file.open("a") as stream:
        stream.write("x")
    return len(file.read_text())


if __name__ == "__main__":
    main()
