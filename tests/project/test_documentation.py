"""The documentation builds without a warning, and what it quotes and commands is there."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.processes import run_ranks
from typer.main import get_command

from psengine.cli import main, server
from psengine.cli.launching.torchrun_options import torchrun_options

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md")), *sorted(ROOT.glob("deploy/**/*.md"))]
DEADLINE_S = 150


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def test_the_pages_build_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "dummy", str(DOCS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr[-6000:]


def run_program(rank: int, world_size: int, source: str) -> float:
    names: dict[str, object] = {}
    exec(compile(source, "quickstart.md", "exec"), names)
    return float(names["mean_loss"])


def test_the_program_of_the_quick_start_learns():
    torch.manual_seed(0)
    (program,) = blocks(DOCS / "quickstart.md", "python")
    losses = run_ranks(run_program, 2, program.replace("psengine.shutdown()", ""))
    assert losses[0] == losses[1] < 0.5


def normalised_source() -> str:
    """All of the package's source, with texts that were cut for their length joined again."""
    source = "\n".join(path.read_text() for path in sorted((ROOT / "psengine").rglob("*.py")))
    return re.sub(r"\"\s*\n\s*f?\"", "", source)


def test_every_message_of_the_troubleshooting_page_is_one_we_print():
    text = (DOCS / "troubleshooting.md").read_text()
    # The terms of its definition lists: a line before one that begins with a colon.
    terms = re.findall(r"^(\S.*)\n: ", text, re.MULTILINE)
    quoted = [message for term in terms for message in re.findall(r"`([^`]+)`", term)]
    assert len(quoted) > 25
    source = normalised_source()
    unknown = []
    for message in quoted:
        words = message.split()
        if len(words) < 3:
            known = message in source
        else:
            # Numbers, names and addresses stand for what varies: most runs of three words have none.
            runs = [" ".join(words[start : start + 3]) for start in range(len(words) - 2)]
            known = sum(run.strip(",.:;") in source for run in runs) >= 0.33 * len(runs)
        if not known and not message.startswith("terminate called"):
            unknown.append(message)
    assert not unknown


def test_the_page_of_commands_is_what_the_commands_say():
    specification = importlib.util.spec_from_file_location("commands_page", DOCS / "commands_page.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    assert module.PAGE.read_text() == module.page(), "run python docs/commands_page.py"


@pytest.mark.parametrize("page", ["launching/reference.md", "servers/reference.md"])
def test_the_tables_of_options_are_those_of_the_commands(page):
    command = get_command(server.build_app(lambda *_: 0))
    if page.startswith("launching"):
        command = get_command(main.build_app("run")).commands["run"]
    shown = [parameter for parameter in command.params if not parameter.hidden]
    options = {name for one in shown for name in (*one.opts, *one.secondary_opts)}
    first_cells = re.findall(r"^\|([^|]*)\|", (DOCS / page).read_text(), re.MULTILINE)
    described = {name for cell in first_cells for name in re.findall(r"--[a-z][a-z-]*", cell)}
    # The page's text says what these do.
    assert described == options - {"--help", "--version", "--config"}


def options_of(command) -> set[str]:
    """A command's options, and those of its own commands."""
    own = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
    return own.union({"--help"}, *map(options_of, getattr(command, "commands", {}).values()))


def test_commands_in_the_documentation_have_the_options_they_are_given():
    known = {name: options_of(command) for name, command in get_command(main.build_app()).commands.items()}
    for name in ("run", "advise"):
        known[name] |= torchrun_options().keys()
    wrong = []
    for page in PAGES:
        for line in re.findall(r"^\s*(?:[A-Z_]+=\S+ )*psengine (\w+)(.*)$", page.read_text(), re.MULTILINE):
            command, rest = line
            if command not in known:
                wrong.append(f"{page.name}: psengine {command}")
                continue
            given = re.split(r"\s\S+\.py\b|\s-m\s|#|\s\|", f" {rest}")[0]  # what follows the script is the script's
            for option in re.findall(r"\s(--[a-z][a-z-]*)", given):
                if option not in known[command]:
                    wrong.append(f"{page.name}: psengine {command} {option}")
    assert not wrong
