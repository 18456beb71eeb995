"""examples/train_mlp.py on two hosts with each launcher; needs root."""

import re
import sys
from pathlib import Path

import pytest
from support.hosts import emulated_hosts, needs_hosts, run_together

SCRIPT = Path(__file__).parents[2] / "examples" / "train_mlp.py"
FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
# Two hosts, one rank each: (a launcher's command, up to the script).
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--nproc-per-node", "1"]
PSENGINE_RUN = [sys.executable, "-m", "psengine.cli.main", "run", "--workers", "1"]
QUIET = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def on_two_hosts(launcher: list[str], *options: str) -> str:
    """What both ranks printed."""
    command = [*launcher, "--nnodes", "2", "--rdzv-endpoint", "node-0:29400", str(SCRIPT), *options]
    with emulated_hosts(2) as hosts:
        ended = run_together(hosts, lambda position: command, environment=QUIET, deadline_s=150)
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
        assert "60000 images" in output
    assert len({re.search(r"weights: sha256 (\w+)", output)[1] for output in outputs}) == 1
