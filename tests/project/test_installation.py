"""The ``pip install`` commands of messages fit how a copy was installed; the other project's package is noticed."""

import os
import subprocess
import sys
from pathlib import Path

import psengine

ROOT = Path(psengine.__file__).parents[1]


def other_project(folder: Path) -> None:
    """What the index's psengine leaves."""
    information = folder / "psengine-2.14.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: psengine\nVersion: 2.14.0\n")


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
    assert "Fix: pip uninstall --yes psengine, then " in last
