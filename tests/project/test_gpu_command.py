"""``make gpu`` on a machine that lacks what it needs."""

import os
import subprocess
import sys
from pathlib import Path

COMMAND = [sys.executable, str(Path(__file__).parents[2] / "release" / "gpu.py")]


def test_it_names_what_is_missing(tmp_path):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "CUDA_HOME": str(tmp_path)}
    done = subprocess.run(COMMAND, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("make gpu: this machine lacks:\n- ")
    assert "- nvcc (in CUDA_HOME/bin, or on PATH)\n" in done.stderr
    assert "- an NVIDIA GPU that torch sees\n" in done.stderr
