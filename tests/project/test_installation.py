"""The commands that say ``pip install``: they fit how a copy was installed; none brings the other project."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_process import running_command

import psengine
from psengine.environment.installation import build_command, install_command, origin, reinstall_command

ROOT = Path(psengine.__file__).parents[1]
EXTRAS = "server|cli|integrations|docs|examples|dev"
# A command that installs the distribution psengine: the name, maybe quoted, and maybe after options and other names.
INSTALLS_THE_OTHER = re.compile(r"(?:pip3?|pipx|uv)\s+(?:install|add|download)\b[^\n|;&#`]*?[ '\"]psengine(?![-\w./])")
NAMES_ITS_EXTRAS = re.compile(rf"(?<![-\w.])psengine\[(?:{EXTRAS}|\{{)")
JOINED_LITERALS = re.compile(r"""["']\s*\n\s*f?r?["']""")


def installed_copy(folder: Path, direct_url: dict | None) -> Path:
    """What pip leaves in a site-packages: the package, and its metadata."""
    package = folder / "psengine"
    package.mkdir(parents=True)
    information = folder / "psengine_torch-0.1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: psengine-torch\nVersion: 0.1.0\n")
    if direct_url is not None:
        (information / "direct_url.json").write_text(json.dumps(direct_url))
    return package


def checkout(folder: Path) -> Path:
    for name in ("psengine", "csrc"):
        (folder / name).mkdir(parents=True)
    (folder / "pyproject.toml").touch()
    return folder / "psengine"


def test_from_a_checkout_whether_editable_or_on_the_path(tmp_path):
    package = checkout(tmp_path)
    assert install_command("server", package=package) == f"pip install -e '{tmp_path}[server]'"
    assert build_command(package=package).endswith(f"-e '{tmp_path}'")
    assert "checkout" in origin(package=package)


def test_from_the_index(tmp_path):
    package = installed_copy(tmp_path, None)
    assert install_command("server", package=package) == "pip install 'psengine-torch[server]'"
    assert install_command("cli", upgrade=True, package=package) == "pip install --upgrade 'psengine-torch[cli]'"
    assert build_command(package=package) == (
        "pip install --force-reinstall --no-deps --no-binary psengine-torch psengine-torch"
    )


def test_from_a_folder_a_wheel_and_a_repository(tmp_path):
    folder, wheel = tmp_path / "the source", tmp_path / "psengine_torch-0.1.0-cp310-abi3-linux_x86_64.whl"
    folder.mkdir()
    wheel.touch()
    vcs = {"vcs": "git", "commit_id": "0" * 40, "requested_revision": "main"}
    repository = {"url": "https://host.example/psengine.git", "vcs_info": vcs}
    reinstall = "pip install --force-reinstall --no-deps"
    for number, (direct, expected) in enumerate(
        [
            ({"url": folder.as_uri(), "dir_info": {}}, f"'{folder}'"),
            ({"url": wheel.as_uri(), "archive_info": {}}, f"'{wheel}'"),
            (
                repository,
                f"'psengine-torch @ git+https://host.example/psengine.git@{'0' * 40}'",
            ),
            ({"url": "file:///gone", "dir_info": {}}, "'psengine-torch'"),
        ]
    ):
        package = installed_copy(tmp_path / str(number), direct)
        assert reinstall_command(package=package) == f"{reinstall} {expected}"
        # Of an installed distribution pip brings the extra's packages, and leaves the distribution alone.
        assert install_command("cli", package=package) == "pip install 'psengine-torch[cli]'"
        assert direct["url"] in origin(package=package)


def other_project(folder: Path, entry_point: str = "") -> None:
    """What the index's psengine leaves."""
    information = folder / "psengine-2.14.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: psengine\nVersion: 2.14.0\n")
    (information / "RECORD").write_text("psengine/__init__.py,,\n")
    (information / "entry_points.txt").write_text(
        f"[console_scripts]\npsengine = {entry_point}\n" if entry_point else ""
    )


def install_the_other_project():
    sys.path.append(os.environ["OTHER_PROJECT"])


def doctor(folder: Path) -> list[dict]:
    environment = {"OTHER_PROJECT": str(folder)}
    line = ["doctor", "--only", "installation", "--json"]
    with running_command(line, environment=environment, prepare=install_the_other_project) as command:
        code, report = command.wait(), json.loads(command.stdout)
    assert code == (1 if report["counts"]["problem"] else 0)
    return [finding for finding in report["findings"] if finding["level"] != "ok" and str(folder) in finding["text"]]


@pytest.mark.parametrize(
    ("entry_point", "level", "text"),
    [("", "problem", "psengine 2.14.0"), ("psengine.cli.main:main", "warning", "former name")],
)
def test_doctor_tells_the_other_project_from_our_former_name(entry_point, level, text, tmp_path):
    assert doctor(tmp_path) == []
    other_project(tmp_path, entry_point)
    (finding,) = doctor(tmp_path)
    assert finding["level"] == level
    assert text in finding["text"]
    if level == "problem":
        assert finding["fix"].startswith(f"pip uninstall --yes psengine, then {reinstall_command()}")


def test_the_command_says_so_where_the_other_project_has_overwritten_this_one(tmp_path):
    """Its __init__.py instead of ours; our command is there still."""
    (tmp_path / "psengine").mkdir()
    for entry in (ROOT / "psengine").iterdir():
        (tmp_path / "psengine" / entry.name).symlink_to(entry)
    (tmp_path / "psengine" / "__init__.py").unlink()
    (tmp_path / "psengine" / "__init__.py").write_text('"""Another project."""\n')
    other_project(tmp_path)
    command = [sys.executable, "-c", "from psengine.cli.main import main; main(['doctor'])"]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
    )
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: Another project's package psengine lies over this one")
    assert f"psengine 2.14.0 in {tmp_path}" in last
    assert "Fix: pip uninstall --yes psengine, then pip install --force-reinstall" in last


def tracked_texts() -> dict[str, str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, timeout=30)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    found = {}
    for name in filter(None, listed.stdout.decode().split("\0")):
        path = ROOT / name
        if path.is_file() and path != Path(__file__).resolve():
            try:
                found[name] = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue  # an image
    return found


def wrong_advice(text: str) -> list[str]:
    joined = JOINED_LITERALS.sub("", text)
    return INSTALLS_THE_OTHER.findall(joined) + NAMES_ITS_EXTRAS.findall(joined)


def test_no_text_of_ours_advises_to_install_the_other_project():
    for text in (
        "pip install -c c.txt 'psengine[server]'",
        '"pip install --upgrade"\n    f" psengine[{extra}]"',
        "uv add psengine",
    ):
        assert wrong_advice(text)
    for text in (
        "pip install 'psengine-torch[server]'",
        "pip install '.[cli]'\npsengine doctor",
        "pip uninstall psengine",
    ):
        assert not wrong_advice(text)
    texts = tracked_texts()
    assert len(texts) > 300
    wrong = {name: found for name, text in texts.items() if name != "CHANGELOG.md" and (found := wrong_advice(text))}
    assert not wrong
    # Commands that install psengine are made in one place of the package.
    named = [name for name, text in texts.items() if name.startswith("psengine/") and "psengine-torch" in text]
    assert named == ["psengine/environment/installation.py"]
