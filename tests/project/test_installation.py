"""What commands say where another project lies over this one, or the machine lacks something."""

import os
import subprocess
import sys
from pathlib import Path

import psengine

ROOT = Path(psengine.__file__).parents[1]


def run_doctor(folder: Path, initial: str) -> subprocess.CompletedProcess[str]:
    """Where Python finds our package first in ``folder``, without its extension and with another ``__init__.py``."""
    (folder / "psengine").mkdir()
    for entry in (ROOT / "psengine").iterdir():
        if not entry.name.startswith(("__init__", "_native")):
            (folder / "psengine" / entry.name).symlink_to(entry)
    (folder / "psengine" / "__init__.py").write_text(initial)
    command = [sys.executable, "-m", "psengine", "doctor", "--only", "versions"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=variables, capture_output=True, text=True, timeout=120, cwd=folder)


def test_sources_without_the_extension_hand_over_to_the_installation_with_a_line(tmp_path):
    """After ``pip install .`` in the sources' folder."""
    (tmp_path / "csrc").mkdir()
    done = run_doctor(tmp_path, (ROOT / "psengine" / "__init__.py").read_text())
    where = f"psengine is imported from {ROOT}/psengine, because {tmp_path}/psengine has no native extension"
    assert (done.returncode, done.stderr.count(where), done.stdout.count(where)) == (0, 1, 1), done.stderr


def test_the_command_says_so_where_the_other_project_has_overwritten_this_one(tmp_path):
    """Its __init__.py instead of ours; our command is there still."""
    left = tmp_path / "psengine-2.14.0.dist-info"
    left.mkdir()
    (left / "METADATA").write_text("Metadata-Version: 2.1\nName: psengine\nVersion: 2.14.0\n")
    done = run_doctor(tmp_path, '"""Another project."""\n')
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: Another project's package psengine lies over this one")
    assert "Fix: pip uninstall --yes psengine, then " in last


def test_make_gpu_names_what_is_missing(tmp_path):
    command = [sys.executable, ROOT / "release" / "gpu.py"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "CUDA_HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith("make gpu: this machine lacks:\n- ")
    assert "- nvcc (in CUDA_HOME/bin, or on PATH)\n" in done.stderr
    assert "- an NVIDIA GPU that torch sees\n" in done.stderr
