"""``make gpu``: build the CUDA kernels here, run the tests and benchmarks that need a GPU, and write their table.

It needs torch, nvcc and pytest, and installs nothing; it says at once what is missing, by name. The table goes to
benchmarks/results/fusion_cuda.json and benchmarks/RESULTS.md, with the device's name.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
DEADLINE_S = 9 * 60
STEPS = {
    "build": "setup.py -q build_ext --inplace",
    "tests": "-m pytest -q -p no:cacheprovider tests/kernels/test_ops_cuda.py",
    "benchmarks": "benchmarks/harness/suite.py --only fusion_cuda,step_overhead_cuda",
}


def missing() -> Iterator[str]:
    """What keeps this from running here."""
    for module in ("pytest", "pytest_timeout", "setuptools", "numpy", "typing_extensions"):
        if importlib.util.find_spec(module) is None:
            yield f"the Python module {module}"
    if shutil.which("g++") is None:
        yield "a C++ compiler, g++"
    nvcc = shutil.which(
        "nvcc", path=os.path.join(os.environ["CUDA_HOME"], "bin") if "CUDA_HOME" in os.environ else None
    )
    if nvcc is None:
        yield "nvcc (in CUDA_HOME/bin, or on PATH)"
    if importlib.util.find_spec("torch") is None:
        yield "the Python module torch"
        return
    import torch

    if torch.version.cuda is None:
        yield f"a torch built for CUDA (got {torch.__version__})"
    elif nvcc is not None:
        found = re.search(r"release (\d+)", subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout)
        expected, got = torch.version.cuda.split(".")[0], found.group(1) if found else "no version"
        if expected != got:
            yield f"nvcc of torch's major CUDA version (expected {expected}, got {got} from {nvcc})"
    if not torch.cuda.is_available():
        yield "an NVIDIA GPU that torch sees"
    elif torch.cuda.get_device_capability() < (7, 5):
        yield f"a GPU of compute capability 7.5 or later (got {torch.cuda.get_device_name()})"


def main() -> None:
    if reasons := list(missing()):
        sys.exit("make gpu: this machine lacks:\n" + "\n".join(f"- {reason}" for reason in reasons))
    import torch

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {sys.executable}", flush=True)
    begin = time.monotonic()
    environment = {**os.environ, "PSENGINE_CUDA": "1", "PYTHONPATH": str(ROOT)}
    failed = []
    for name, arguments in STEPS.items():
        left_s = DEADLINE_S - (time.monotonic() - begin)
        print(f"\n---- {name}, {left_s:.0f} s left", flush=True)
        try:
            command = [sys.executable, *arguments.split()]
            code = subprocess.run(command, cwd=ROOT, env=environment, timeout=left_s).returncode
        except subprocess.TimeoutExpired:
            sys.exit(f"make gpu: {name} did not end within {DEADLINE_S} s of the beginning")
        if code != 0:
            failed.append(name)
        if name == "build" and failed:
            break
    if failed:
        sys.exit(f"make gpu: failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
