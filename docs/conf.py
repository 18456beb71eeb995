"""Sphinx's settings: ``make docs`` builds these pages, and takes warnings for errors."""

import re
from pathlib import Path

import typer
from pygments.lexers.special import TextLexer
from typer.cli import get_docs_for_click
from typer.main import get_command

import psengine
from psengine.cli import main, server

ROOT = Path(__file__).resolve().parents[1]

project = "psengine"
author = "The psengine authors"
copyright = "The psengine authors"
version = release = psengine.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["_build", "_generated"]
html_theme = "furo"
html_title = f"psengine {release}"
html_static_path = []

myst_enable_extensions = ["colon_fence", "deflist", "fieldlist"]
myst_heading_anchors = 3

# Not installed where the pages are built.
autodoc_mock_imports = ["ray"]
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# "Attributes:" of a class are listed where its docstring has them, and not once more as members.
napoleon_use_ivar = True

# Links out of docs/ work where the repository is browsed. Here, benchmarks have pages of their own; other files of the
# repository are named.
_LINK = re.compile(r"\[([^\]]+)\]\((?:\.\./)+((?:benchmarks|examples|tests|deploy|csrc|psengine)(?:/[^)#\s]*)?)\)")


def _point_inside(app, document, content):
    """Rewrite the links of ``document``, in place."""
    depth = document.count("/")

    def replace(link):
        text, path = link.group(1), link.group(2).rstrip("/")
        page = re.fullmatch(r"benchmarks/(\w+)(?:/README\.md)?", path)
        if page and (ROOT / "docs" / "benchmarks" / f"{page.group(1)}.md").exists():
            return f"[{text}]({'../' * depth}benchmarks/{page.group(1)}.md)"
        if path == "benchmarks/RESULTS.md":
            return f"[{text}]({'../' * depth}benchmarks/results.md)"
        if path in ("benchmarks", "benchmarks/README.md"):
            return f"[{text}]({'../' * depth}benchmarks/index.md)"
        if not (ROOT / path).exists():
            raise ValueError(f"docs/{document}.md links to {path}, which is not there")
        return f"`{path}`" if text.strip("`") == path else f"{text} (`{path}`)"

    content[0] = _LINK.sub(replace, content[0])


def _write_commands(app, config):
    """Write what commands.md includes: typer's own pages of the commands, one level lower."""
    written = []
    for name, made in (("psengine", main.build_app()), ("psengine-server", server.build_app(lambda *_: 0))):
        command = get_command(made)
        text = get_docs_for_click(obj=command, ctx=typer.Context(command), name=name)
        written.append(re.sub(r"^#", "##", re.sub(r"\[/?bold\]", "**", text), flags=re.MULTILINE))
    page = Path(app.srcdir) / "_generated" / "commands.md"
    page.parent.mkdir(exist_ok=True)
    page.write_text("\n".join(written))


def setup(app):
    """Called by Sphinx."""
    app.connect("config-inited", _write_commands)
    app.add_lexer("hex", TextLexer)
    app.connect("source-read", _point_inside)
    # The event names the including page without its folder; the environment knows all of it.
    app.connect("include-read", lambda app, path, parent, content: _point_inside(app, app.env.docname, content))
