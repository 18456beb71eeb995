"""What an installed wheel must do. ``make wheel`` runs it in a fresh environment.

It runs with the interpreter of the environment, outside the checkout, and ends with the first failure.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS, DEADLINE_S = 8, 240


def main() -> None:
    import torch

    import psengine
    from psengine.kernels import native, ops

    package = Path(psengine.__file__).parent
    expect(package.is_relative_to(sys.prefix), f"psengine below {sys.prefix}", package)
    expect(native.has_shared_memory(), "the native extension, with shared memory", native.reason)
    print(f"psengine {psengine.__version__}, torch {torch.__version__}, {ops.native_kernels()} kernels")
    train_on_two_ranks()
    said = command("psengine", "doctor")
    expect(re.search(r"^ok +native-extension", said, re.MULTILINE), "native-extension to be ok", said)
    expect("0 problems" in said, "0 problems", said)
    expect(psengine.__version__ in command("psengine-server", "--version"), "the server's version", "another")
    print("the wheel works")


def train_on_two_ranks() -> None:
    """Two ranks train under native DDP and under ours in shared memory: the same bits."""
    with tempfile.TemporaryDirectory() as folder:
        line = ["run", "--workers", "2", str(Path(__file__).resolve()), "rank", folder]
        said = command("psengine", *line)
    expect(said.count("bits of native DDP") == 2, "two ranks with the bits of native DDP", said)


def train_as_rank() -> None:
    import torch

    import psengine

    context = psengine.init("gloo")
    finals = []
    for wrap in (torch.nn.parallel.DistributedDataParallel, psengine.DistributedDataParallel):
        torch.manual_seed(0)
        module = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
        is_ours = wrap is psengine.DistributedDataParallel
        model = wrap(module, **({"collective": "shared_memory"} if is_ours else {}))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        torch.manual_seed(1 + context.rank)
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(16, 8)).square().mean().backward()
            optimizer.step()
        finals.append(torch.cat([parameter.detach().flatten() for parameter in module.parameters()]))
    expect(torch.equal(*finals), "the bits of native DDP", (finals[0] - finals[1]).abs().max())
    model = psengine.DistributedDataParallel(torch.nn.Linear(8, 4), strategy="sync-server")
    optimizer = psengine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model(torch.randn(16, 8)).square().mean().backward()
    optimizer.step()
    # In one write: the two ranks share a pipe.
    sys.stdout.write(f"rank {context.rank}: {STEPS} steps in shared memory with the bits of native DDP\n")
    psengine.shutdown()


def command(name: str, *arguments: str, code: int = 0) -> str:
    """Run a program of this environment; return what it printed."""
    line = [str(Path(sys.executable).with_name(name)), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(line, capture_output=True, text=True, timeout=DEADLINE_S, env=environment)
    said = done.stdout + done.stderr
    expect(done.returncode == code, f"exit code {code} of {' '.join(line)}", f"{done.returncode}:\n{said}")
    print(said, end="")
    return said


def expect(holds: object, expected: str, got: object) -> None:
    if not holds:
        sys.exit(f"trial of the wheel: expected {expected}, got {got}")


if __name__ == "__main__":
    train_as_rank() if sys.argv[1:2] == ["rank"] else main()
