"""Trains through a storm of faults, and compares every bit with a calm day and with native DDP; see README.md.

python benchmarks/storm/run.py --minutes 2 --faults-per-hour 600 --seed 1 --seeds 20
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

_ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(_ROOT / "tests"), str(_ROOT / "benchmarks"), str(Path(__file__).parent)]

from account import Training  # noqa: E402
from faults import SHARES, Fault, plan  # noqa: E402
from harness.command_line import at_least, parser_of, some_of  # noqa: E402
from harness.record import Record  # noqa: E402
from harness.tables import Table  # noqa: E402
from job import ENVIRONMENT, Program, Storm, train  # noqa: E402
from result import Result, spread, tables  # noqa: E402

QUESTION = "What is left of a training through which a storm of faults goes?"
HOSTS = VIRTUAL_WORKERS = 8
LEASE_S = 2.0
EPOCHS = 2
PEER_WORKERS = 2
BATCH = 8
# Of the time that steps take on a calm day: what the storm leaves of it, as a guess.
GOODPUT = 0.7
CALIBRATION_STEPS = 40
PROGRAM = str(Path(__file__).with_name("training.py"))


def elastic(address: str, out: Path, arguments: list[str], virtual_workers: int, hosts: int) -> Program:
    """psengine's."""
    port = address.rpartition(":")[2]
    bind = address if "127.0.0.1" in address else f"tcp://0.0.0.0:{port}"
    server = ["-m", "psengine.cli.server", "--bind", bind, "--insecure", "--lease-s", f"{LEASE_S:g}"]
    run = ["-m", "psengine.cli.main", "run", "--workers", "1", "--independent", "--max-restarts", "1000000"]
    run += ["--strategy", f"sync:virtual_workers={virtual_workers}"]
    run += ["--server-address", address, "--total-workers", str(hosts)]
    own = [str(out), *arguments, "--checkpoints", str(out / "checkpoints"), "--epochs", str(EPOCHS)]
    return Program(
        [sys.executable, *server],
        # Something follows the name, so that node-1 is not node-10.
        lambda index, name: [
            *(sys.executable, *run, "--first-worker", str(index), PROGRAM, "--host", name, *own),
        ],
    )


def be_oracle(out: Path, arguments: list[str]) -> Training:
    """What bits are compared with: native DDP with a rank for each virtual worker."""
    out.mkdir()
    run = [sys.executable, "-m", "psengine.cli.main", "run", "--workers", str(VIRTUAL_WORKERS)]
    command = [*run, PROGRAM, str(out), *arguments, "--epochs", str(EPOCHS), "--native"]
    subprocess.run(command, check=True, env={**os.environ, **ENVIRONMENT})
    return Training.read(out)


def main() -> None:
    parser = parser_of(__doc__, rounds=1, quick="twenty seconds")
    add = parser.add_argument
    add("--minutes", type=float, default=2.0, help="of the storm, about (default: 2)")
    add("--faults-per-hour", type=float, default=600.0)
    add("--seed", type=int, default=1)
    add("--seeds", type=at_least(0), default=1, help="storms, one after the other: of this seed and the next ones")
    add("--spares", type=at_least(0), default=0, help="hosts with a worker that waits for a place")
    add("--causes", type=some_of(list(SHARES)), default=tuple(SHARES), help="some of %(default)s")
    add("--steps", type=at_least(EPOCHS), help="default: as many as fit")
    add("--torchft", type=Path, metavar="PYTHON", help="an interpreter with torchft: the table beside it")
    options = parser.parse_args()
    if options.quick:
        options.minutes = 1 / 3
    record = Record.begin("storm", QUESTION, options)
    directory = Path(tempfile.mkdtemp(prefix="psengine-storm-"))
    is_true = compare(directory, options, record) if options.seeds else True
    if options.torchft is not None:
        record.tables.append(beside_torchft(directory, options))
    record.finish()
    if is_true:
        shutil.rmtree(directory)
    else:
        print(f"What each worker did and wrote is in {directory}")
    sys.exit(not is_true)


def faults_of(options: argparse.Namespace, seed: int, hosts: int, causes: Sequence[str]) -> list[Fault]:
    return plan(
        seed,
        per_hour=options.faults_per_hour,
        lease_s=LEASE_S,
        hosts=hosts,
        most_s=options.minutes * 60,
        causes=causes,
    )


def compare(directory: Path, options: argparse.Namespace, record: Record) -> bool:
    """Train as the oracle does, on a calm day, and through each storm; return whether all weights are equal."""

    def size(steps: int) -> list[str]:
        # The last step of an epoch is not full.
        samples = steps // EPOCHS * VIRTUAL_WORKERS * BATCH - 5
        return ["--batch", str(BATCH), "--samples", str(samples)]

    def run(name: str, arguments: list[str], faults: list[Fault], spares: int = 0) -> tuple[Training, Storm]:
        out, hosts = directory / name, HOSTS + spares
        return train(
            out,
            lambda address: elastic(address, out, arguments, VIRTUAL_WORKERS, hosts),
            faults,
            hosts=hosts,
            deadline_s=options.deadline,
        )

    steps = options.steps
    if steps is None:
        calibration, _ = run("calibration", size(CALIBRATION_STEPS), [])
        steps = max(CALIBRATION_STEPS, int(calibration.steps_per_s * options.minutes * 60 * GOODPUT))
    arguments = size(steps)
    oracle = be_oracle(directory / "oracle", arguments)
    calm, _ = run("calm", arguments, [])
    results = []
    for seed in range(options.seed, options.seed + options.seeds):
        faults = faults_of(options, seed, HOSTS, options.causes)
        name = f"storm-{seed}"
        try:
            found, storm = run(name, arguments, faults, options.spares)
        except TimeoutError as error:
            print(f"seed {seed}: {error}", flush=True)
            results.append(Result(seed, Training(), calm, oracle, [], int(arguments[3]), EPOCHS))
            continue
        results.append(Result(seed, found, calm, oracle, storm.done, int(arguments[3]), EPOCHS))
        print(f"seed {seed}: {results[-1].line()}", flush=True)
        if results[-1].is_true:
            shutil.rmtree(directory / name)
    record.tables += tables(results)
    record.values |= {"steps": steps, "calm": calm.steps_per_s, "lines": [result.line() for result in results]}
    return all(result.is_true for result in results)


def torchft(python: Path, address: str, out: Path, samples: int, batch: int) -> Program:
    """torchft's: a lighthouse for the coordinator, torchrun for the launcher."""
    port = address.rpartition(":")[2]
    # As torchft's README starts it, with our lease.
    limits = ["--quorum_tick_ms", "100", "--join_timeout_ms", "10000", "--heartbeat_timeout_ms", f"{LEASE_S * 1000:g}"]
    own = ["--out", str(out), "--samples", str(samples), "--batch", str(batch)]
    torchrun = [str(python), "-m", "torch.distributed.run", "--standalone", "--max-restarts", "1000000"]
    environment = ["env", f"TORCHFT_LIGHTHOUSE={address.replace('tcp', 'http')}"]
    program = str(Path(PROGRAM).with_name("torchft_training.py"))
    return Program(
        [str(python.with_name("torchft_lighthouse")), "--min_replicas", "1", "--bind", f"[::]:{port}", *limits],
        lambda index, name: [*environment, *torchrun, program, "--host", name, *own, "--replica", str(index)],
    )


def beside_torchft(directory: Path, options: argparse.Namespace) -> Table:
    """Both through the same kills of workers, with two workers and the same batches."""
    samples, batch, most_s = 40_000, VIRTUAL_WORKERS // PEER_WORKERS * BATCH, options.minutes * 60
    kills = faults_of(options, options.seed, PEER_WORKERS, ["worker killed"])
    own = ["--batch", str(batch), "--samples", str(samples)]
    programs = {
        "psengine": lambda out: lambda address: elastic(address, out, own, PEER_WORKERS, PEER_WORKERS),
        "torchft": lambda out: lambda address: torchft(options.torchft, address, out, samples, batch),
    }
    rows = []
    for name, program_of in programs.items():
        trainings = []
        for kind, faults in (("calm", []), ("storm", kills)):
            out = directory / f"{name}-{kind}"
            end = {"hosts": PEER_WORKERS, "deadline_s": options.deadline, "most_s": most_s}
            trainings.append(train(out, program_of(out), faults, **end, shared=[options.torchft.parents[1]]))
        (calm, _), (found, storm) = trainings
        # What torchft writes down with a step is how many replicas took part.
        left_out = sum(batch * (PEER_WORKERS - count) for count in found.numbers.values()) if name == "torchft" else 0
        rows.append(
            [
                *(name, f"{calm.steps_per_s:.1f}", f"{found.steps_per_s:.1f}"),
                *(f"{found.steps_per_s / calm.steps_per_s:.0%}", len(storm.done)),
                *(spread(found.stalls(storm.done)["a kill"], digits=2)),
                spread(found.next_contributions(storm.done)[1], digits=1)[0],
                f"{left_out:,.0f} of {len(found.numbers) * batch * PEER_WORKERS:,}",
            ]
        )
    columns = ["", "steps a second, calm", "in the storm", "goodput", "kills", "stall, median", "p99", "longest"]
    columns += ["next contribution, median", "samples left out"]
    return Table("Two workers, kills of workers alone", columns, rows)


if __name__ == "__main__":
    main()
