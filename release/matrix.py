"""``make test-matrix``: the core tests, against one wheel, with other versions of Python and torch.

Every pair gets an environment of its own in build/matrix, which is kept. Interpreters are those on PATH and pyenv's;
where there is none of a version, its pair is left out. The tests run in an unpacked source distribution without the
package, so they can import the wheel's only. Name other pairs as arguments: make test-matrix MATRIX='python3.13=2.14.0'
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from make_wheel import ROOT, build

FOLDER = ROOT / "build" / "matrix"
# Python and torch: oldest with oldest, newest with newest. The versions of constraints.txt are those of `make test`.
PAIRS = (("3.10", "2.11.*"), ("3.11", "2.12.*"), ("3.12", "2.14.*"), ("3.13", ""), ("3.14", ""))
CORE = (
    *("wrapper", "gradients", "strategies", "collectives", "kernels", "codecs", "data", "flat_optimizers"),
    *("torch_suite", "ways_of_training", "protocol"),
)
# Besides the package with its extra "examples".
TEST_PACKAGES = ("expecttest", "hypothesis", "pytest", "pytest-timeout", "pytest-xdist")
DEADLINE_S = 1800


def main() -> None:
    os.environ["PYTHONPATH"] = ""  # with a checkout on it pip would think that the wheel is installed already
    pairs = list(named_pairs(sys.argv[1:]) if sys.argv[1:] else pairs_here())
    if not pairs:
        sys.exit(f"no interpreter was found (expected one of {', '.join(python for python, _ in PAIRS)} on PATH)")
    wheel = build(FOLDER / "built", FOLDER / "dist")
    source = unpack(next((FOLDER / "dist").glob("*.tar.gz")))
    lines = [f"{'Python':<9}{'torch':<16}result"]
    has_failed = False
    for python, torch in pairs:
        try:
            environment, versions = prepare(python, torch, wheel)
            result, is_green = run_tests(environment, source)
        except subprocess.CalledProcessError as error:
            versions, result, is_green = f"{Path(python).name:<9} {torch:<16}", f"set-up failed: {error}", False
        has_failed |= not is_green
        lines.append(f"{versions}{result}")
        print(lines[-1], flush=True)
    print("\n".join(lines))
    sys.exit(has_failed)


def named_pairs(words: list[str]) -> Iterator[tuple[str, str]]:
    for word in words:
        python, _, torch = word.partition("=")
        if not torch or not runs(python):
            sys.exit(
                "expected an interpreter that runs and a torch (python3.13=2.14.0 or /path/to/python3.13=newest), got"
                f" {word}"
            )
        yield python, "" if torch == "newest" else torch


def pairs_here() -> Iterator[tuple[str, str]]:
    for version, torch in PAIRS:
        found = find_interpreter(version)
        if found:
            yield found, torch
        else:
            print(f"no python{version} here: its pair is left out", flush=True)


def find_interpreter(version: str) -> str | None:
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    candidates = [f"python{version}", *map(str, sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True))]
    return next((candidate for candidate in candidates if runs(candidate)), None)


def runs(python: str) -> bool:
    """Whether it does: pyenv's shims are there for versions that are not chosen, and fail."""
    try:
        return subprocess.run([python, "-c", "import venv, ensurepip"], capture_output=True, timeout=60).returncode == 0
    except OSError:
        return False


def unpack(archive: Path) -> Path:
    folder = FOLDER / "source"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.unpack_archive(archive, folder)
    (source,) = folder.iterdir()
    shutil.rmtree(source / "psengine")
    return source


def prepare(python: str, torch: str, wheel: Path) -> tuple[Path, str]:
    """Make the environment where it is not there; return it, and the versions as a row begins."""
    ask = "import sys; print('{}.{}'.format(*sys.version_info))"
    version = subprocess.check_output([python, "-c", ask], text=True).strip()
    environment = FOLDER / f"python{version}-torch{torch.rstrip('.*') or '-newest'}"
    interpreter = environment / "bin" / "python"
    if not interpreter.exists():
        subprocess.run([python, "-m", "venv", environment], check=True)
    pip = [interpreter, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    subprocess.run([*pip, f"torch=={torch}" if torch else "torch"], check=True)
    subprocess.run([*pip, *TEST_PACKAGES, f"psengine-torch[examples] @ {wheel.as_uri()}"], check=True)
    subprocess.run([*pip, "--force-reinstall", "--no-deps", wheel], check=True)
    ask = "import platform, torch; print(f'{platform.python_version():<9}{torch.__version__:<16}')"
    return environment, subprocess.check_output([interpreter, "-c", ask], text=True).rstrip("\n")


def run_tests(environment: Path, source: Path) -> tuple[str, bool]:
    """The last line of pytest, and whether no test failed."""
    folders = [str(source / "tests" / folder) for folder in CORE]
    options = ["-q", "-p", "no:cacheprovider", "-m", "not slow", "-n", "3", "--dist", "loadfile"]
    variables = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    log = environment.with_name(f"{environment.name}.log")
    with log.open("w") as file:
        command = [environment / "bin" / "python", "-m", "pytest", *options, *folders]
        try:
            done = subprocess.run(
                command, cwd=source, env=variables, stdout=file, stderr=subprocess.STDOUT, timeout=DEADLINE_S
            )
        except subprocess.TimeoutExpired:
            return f"had not ended after {DEADLINE_S} s: {log}", False
    last = log.read_text().rstrip().rpartition("\n")[2].strip("= ")
    return (last if done.returncode == 0 else f"{last}: {log}"), done.returncode == 0


if __name__ == "__main__":
    main()
