"""The ``pip install`` commands of messages fit how a copy was installed; the other project's package is noticed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from support.command_process import running_command

import psengine
from psengine.environment.installation import build_command, install_command

ROOT = Path(psengine.__file__).parents[1]


def test_commands_for_a_checkout_and_for_an_installed_copy(tmp_path):
    checkout = tmp_path / "checkout"
    for directory in (checkout / "psengine", checkout / "csrc"):
        directory.mkdir(parents=True)
    (checkout / "pyproject.toml").touch()
    assert install_command("ray", package=checkout / "psengine") == f"pip install -e '{checkout}[ray]'"
    assert build_command(package=checkout / "psengine").endswith(f"--no-deps -e '{checkout}'")
    installed = tmp_path / "site-packages" / "psengine"
    assert install_command("ray", package=installed) == "pip install 'psengine-torch[ray]'"
    assert build_command(package=installed).endswith("--no-deps .")


def other_project(folder: Path) -> None:
    """What the index's psengine leaves."""
    information = folder / "psengine-2.14.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: psengine\nVersion: 2.14.0\n")


def install_the_other_project():
    sys.path.append(os.environ["OTHER_PROJECT"])


def test_doctor_finds_the_other_project(tmp_path):
    other_project(tmp_path)
    line = ["doctor", "--only", "versions", "--json"]
    environment = {"OTHER_PROJECT": str(tmp_path)}
    with running_command(line, environment=environment, prepare=install_the_other_project) as command:
        assert command.wait() == 1
        findings = json.loads(command.stdout)["findings"]
    (finding,) = [finding for finding in findings if f"psengine 2.14.0 in {tmp_path}" in finding["text"]]
    assert finding["level"] == "problem"
    assert finding["fix"].startswith(f"pip uninstall --yes psengine, then {build_command()}")


def test_the_command_says_so_where_the_other_project_has_overwritten_this_one(tmp_path):
    """Its __init__.py instead of ours; our command is there still."""
    (tmp_path / "psengine").mkdir()
    for entry in (ROOT / "psengine").iterdir():
        (tmp_path / "psengine" / entry.name).symlink_to(entry)
    (tmp_path / "psengine" / "__init__.py").unlink()
    (tmp_path / "psengine" / "__init__.py").write_text('"""Another project."""\n')
    other_project(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", "from psengine.cli.main import main; main(['doctor'])"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: Another project's package psengine lies over this one")
    assert "psengine 2.14.0" in last
    assert "Fix: pip uninstall --yes psengine, then " in last
