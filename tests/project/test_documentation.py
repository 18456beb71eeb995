"""The documentation builds without a warning, and what it quotes and commands is there."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from typer.main import get_command

from psengine.cli import main
from psengine.cli.launching.plan import torchrun_options
from psengine.parameter_server.server.coordinator.states import JOB, WORKER

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md")), *sorted(ROOT.glob("deploy/**/*.md"))]
DEADLINE_S = 150


def test_the_pages_build_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "dummy", str(DOCS), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr[-6000:]


def drawn(table: dict[Any, dict[str, Any]]) -> str:
    """The table as Markdown: a row for each state, a column for each event; empty cells cannot happen."""
    events = list(dict.fromkeys(event for row in table.values() for event in row))
    lines = [["", *events], ["---"] * (len(events) + 1)]
    for state, row in table.items():
        lines.append([f"**{state.value}**", *(row[event].value if event in row else "" for event in events)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def test_the_tables_of_states_on_the_page_are_the_code_s():
    page = (DOCS / "design.md").read_text()
    for table in (drawn(JOB), drawn(WORKER)):
        assert table in page, f"docs/design.md has another table; the code's:\n{table}"


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
        shown = "\n".join(re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL))
        for command, rest in re.findall(r"^\s*(?:[A-Z_]+=\S+ )*psengine (\w+)(.*)$", shown, re.MULTILINE):
            if command not in known:
                wrong.append(f"{page.name}: psengine {command}")
                continue
            given = re.split(r"\s\S+\.py\b|\s-m\s|#|\s\|", f" {rest}")[0]  # what follows the script is the script's
            for option in re.findall(r"\s(--[a-z][a-z-]*)", given):
                if option not in known[command]:
                    wrong.append(f"{page.name}: psengine {command} {option}")
    assert not wrong
