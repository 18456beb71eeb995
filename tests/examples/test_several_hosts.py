"""examples/train_mlp.py: two ranks against native DDP and against one process; two hosts with each launcher."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from support.examples import Ended, run_main, write_images
from support.hosts import emulated_hosts, needs_hosts, run_together
from support.processes import run_ranks

SCRIPT = Path(__file__).parents[2] / "examples" / "train_mlp.py"
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")


@pytest.fixture(scope="module")
def small_images(tmp_path_factory):
    return write_images(tmp_path_factory.mktemp("data") / "images")


def epochs(output: str) -> list[tuple[float, float]]:
    """(loss, accuracy in percent) of each epoch."""
    return [(float(loss), float(part)) for loss, part in re.findall(r"loss ([\d.]+), accuracy ([\d.]+)%", output)]


def weights(output: str) -> str:
    (found,) = re.findall(r"^(?:\[.*\] ?:?)?weights: sha256 (\w+)$", output, re.MULTILINE)
    return found


def all_ways(rank: int, world_size: int, images: Path, batch_size: int) -> list[Ended]:
    options = ("--data", images, "--batch-size", batch_size, "--learning-rate", 0.1, "--epochs", 2)
    too_large = run_main(rank, world_size, "train_mlp", "--data", images, "--batch-size", 100_000)
    return [run_main(rank, world_size, "train_mlp", *options, *more) for more in ((), ("--native",))] + [too_large]


def test_two_ranks_take_one_process_s_steps_with_native_ddps_bits(small_images):
    (ours, native, too_large), (other, *_) = run_ranks(all_ways, 2, small_images, 32)
    ((alone, *_),) = run_ranks(all_ways, 1, small_images, 64)
    assert (ours.code, other.code, alone.code) == (0, 0, 0), ours.errors + alone.errors
    assert weights(ours.output) == weights(native.output)
    assert epochs(ours.output) == epochs(native.output)
    for (loss, accuracy), (expected_loss, expected_accuracy) in zip(
        epochs(ours.output), epochs(alone.output), strict=True
    ):
        assert loss == pytest.approx(expected_loss, abs=2e-4)
        assert accuracy == pytest.approx(expected_accuracy, abs=1.0)
    assert epochs(ours.output)[-1][1] > 60
    assert "weights" not in other.output
    assert too_large.code == 2
    assert "expected batches of at most 320, got 100000" in too_large.errors


# Two hosts, one rank each: (a launcher's command, up to the script).
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--nproc-per-node", "1"]
PSENGINE_RUN = [sys.executable, "-m", "psengine.cli.main", "run", "--workers", "1"]


def on_two_hosts(launcher: list[str], *options: str) -> str:
    """What both ranks printed."""
    command = [*launcher, "--nnodes", "2", "--rdzv-endpoint", "node-0:29400", str(SCRIPT), *options]
    quiet = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with emulated_hosts(2) as hosts:
        ended = run_together(hosts, lambda position: command, environment=quiet, deadline_s=150)
    assert [each.code for each in ended] == [0, 0], "\n".join(each.stdout + each.stderr for each in ended)
    return "".join(each.stdout for each in ended)


@pytest.mark.slow
@pytest.mark.timeout(500)
@needs_hosts
@pytest.mark.skipif(not FASHION_MNIST.is_dir(), reason=f"{FASHION_MNIST} is missing (Debian: dataset-fashion-mnist)")
def test_two_hosts_train_alike_with_each_launcher():
    outputs = [
        on_two_hosts(TORCHRUN, "--epochs", "1"),
        on_two_hosts(PSENGINE_RUN, "--epochs", "1"),
        on_two_hosts(TORCHRUN, "--epochs", "1", "--native"),
    ]
    for output in outputs:
        assert {"rank 0 of 2 on", "rank 1 of 2 on"} <= set(re.findall(r"rank \d of 2 on", output))
        assert set(re.findall(r"rank \d of 2 on (\S+)", output)) == {"node-0", "node-1"}
        assert "60000 images of 28x28" in output
    assert len({re.search(r"weights: sha256 (\w+)", output)[1] for output in outputs}) == 1


SHARED = """
import psengine, torch
context = psengine.init("gloo")
try:
    psengine.DistributedDataParallel(torch.nn.Linear(1, 1), collective="shared_memory")
except psengine.PSEngineError as error:
    print(f"{context.hostname}: {error}")
"""


@pytest.mark.slow
@needs_hosts
def test_ranks_on_two_hosts_do_not_share_memory(tmp_path):
    script = tmp_path / "shared.py"
    script.write_text(SHARED)
    with emulated_hosts(2, shared=[tmp_path]) as hosts:
        command = [*TORCHRUN, "--nnodes", "2", "--rdzv-endpoint", "node-0:29400", script]
        ended = run_together(hosts, lambda position: command, environment={"OMP_NUM_THREADS": "1"})
    for each in ended:
        assert "rank 1 runs in another process namespace" in each.stdout, each.stdout + each.stderr
