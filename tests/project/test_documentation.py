"""The documentation builds without a warning, and what it quotes and commands is there."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from typer.main import get_command

from psengine.cli import main, server
from psengine.cli.launching.plan import torchrun_options
from psengine.parameter_server.server.coordinator.states import JOB, WORKER

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md")), *sorted(ROOT.glob("deploy/**/*.md"))]
DEPLOYED = [
    *(ROOT / "deploy" / "slurm").glob("*.sbatch"),
    *(ROOT / "deploy" / where for where in ("docker/Dockerfile", "kubernetes/base/servers.yaml")),
]
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


def options_of(name: str, command: Any) -> dict[str, set[str]]:
    """By what is typed, a command's options, and those of its own commands."""
    own = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    found = {name: {"--help", *own}}
    for part, one in getattr(command, "commands", {}).items():
        found |= options_of(f"{name} {part}", one)
    return found


def commands_in(path: Path) -> list[list[str]]:
    text, line = path.read_text(), r"^[^#\n]*?(?<![\w/-])(psengine(?:-server| run) .*)$"
    if path.suffix == ".md":
        line = r"^\s*(?:[A-Z_]+=\S+ )*(psengine(?:-server)? (?!\w+:).*)$"  # no output
        text = "\n".join(re.findall(r"^```\w*\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    text = re.sub(r'\\\n|\n +- (?=--)|", "', " ", text)  # how shells, YAML and JSON go on with a command
    return [command.split() for command in re.findall(line, text, re.MULTILINE)]


def test_commands_have_the_options_they_are_given():
    known = options_of("psengine", get_command(main.build_app()))
    known |= options_of("psengine-server", get_command(server.build_app(lambda *_: 0)))
    for name in ("run", "advise"):
        known[f"psengine {name}"] |= torchrun_options().keys()
    wrong = []
    for path in [*PAGES, *DEPLOYED]:
        commands = commands_in(path)
        assert commands or path in PAGES, f"no command is found in {path}"
        for name, *rest in commands:
            while rest and f"{name} {rest[0]}" in known:
                name = f"{name} {rest.pop(0)}"
            # What follows the script is the script's.
            given = re.split(r"\s\S+\.py\b|\s-m\s|\s#|\s\|", f" {' '.join(rest)}")[0]
            if name == "psengine" and not given.startswith(" --"):
                wrong.append(f"{path.name}: psengine{given}")
            unknown = set(re.findall(r"\s(--[a-z][a-z-]*)", given)) - known[name]
            wrong += [f"{path.name}: {name} {option}" for option in unknown]
    assert not wrong, wrong
