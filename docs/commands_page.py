"""Write docs/commands.md, the reference of the commands, from the commands themselves: python docs/commands_page.py"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from typer.main import get_command

from psengine.cli.main import build_app
from psengine.cli.server import build_app as build_server_app

PAGE = Path(__file__).with_name("commands.md")
INTRODUCTION = """# Commands

All commands with all options, written by `python docs/commands_page.py` from what `--help` shows.
[`psengine run`](launching/reference.md) and [`psengine-server`](servers/reference.md#the-daemon) have pages with
explanations. Options of `psengine-server` may also be [variables or lines of a file](settings.md#servers).

"""


def page() -> str:
    """The page as Markdown."""
    psengine, server = get_command(build_app()), get_command(build_server_app(lambda *_: 0))
    commands = [(f"psengine {name}", command) for name, command in psengine.commands.items()]
    return INTRODUCTION + "\n".join(section(*one) for one in [*commands, ("psengine-server", server)])


def section(name: str, command: Any) -> str:
    parts = [f"## {name}", prose(command.help or "")]
    options = [one for one in command.params if not getattr(one, "hidden", False) and one.name != "help"]
    if options:
        parts.append("\n".join(["| option | default | |", "|---|---|---|", *map(table_row, options)]))
    if command.epilog:
        parts.append(prose(command.epilog))
    below = [section(f"{name} {one}", inner) for one, inner in getattr(command, "commands", {}).items()]
    return "\n".join(["\n\n".join(parts) + "\n", *below])


def table_row(parameter: Any) -> str:
    names = [*parameter.opts, *parameter.secondary_opts]
    is_flag = getattr(parameter, "is_flag", False)
    is_argument = not names[0].startswith("-")
    value = "" if is_flag or is_argument else f" {parameter.metavar or 'VALUE'}"
    shown = ", ".join(f"`{name.upper() if is_argument else name}{value}`" for name in names)
    default = "" if is_flag or parameter.default is None else f"`{parameter.default}`"
    return f"| {shown} | {default} | {cell(parameter.help or '')} |".replace("|  |", "| |")


def cell(text: str) -> str:
    return marked_up(text).replace("|", r"\|")


def prose(text: str) -> str:
    """Paragraphs; the lines of examples become one block of code."""
    found: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        line = " ".join(paragraph.split())
        if not line.startswith("psengine "):
            found.append(marked_up(line))
        elif found and found[-1].endswith("\n```"):
            found[-1] = f"{found[-1][:-4]}\n{paragraph.strip()}\n```"
        else:
            found.append(f"```\n{paragraph.strip()}\n```")
    return "\n\n".join(found)


def marked_up(text: str) -> str:
    """Rich's marks as Markdown's; options and variables as code."""
    text = re.sub(r"\[bold\](psengine .*?|ssh .*?)\[/bold\]", r"`\1`", text)
    text = re.sub(r"\[/?bold\]", "**", text)
    pieces = re.split(r"(`[^`]*`)", text)
    named = r"(?<![\w`-])(--[a-z][a-z-]*|PSENGINE_[A-Z_]*[A-Z]|(?:tcp|ipc|http)://[^\s;)]*[^\s;),.])"
    return "".join(one if one.startswith("`") else re.sub(named, r"`\1`", one) for one in pieces)


if __name__ == "__main__":
    PAGE.write_text(page())
