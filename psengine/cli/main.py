"""``psengine``: launch, watch, debug and check data-parallel training. One module per command."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

import typer

from psengine.errors import PSEngineError

EXIT_USAGE = 2
# Each has a module, whose register(app) adds the command.
COMMANDS = ("run", "verify", "status", "admin", "replay", "doctor", "advise")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; ends the process with the command's exit code: 2 with one message for a PSEngineError."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        build_app(arguments[0] if arguments else None)(args=arguments, prog_name="psengine")
    except PSEngineError as error:
        with suppress(OSError):
            print(f"psengine: {error}", file=sys.stderr)
        sys.exit(EXIT_USAGE)
    finally:
        give_up_unwritable_stderr()


def give_up_unwritable_stderr() -> None:
    """Drop what a broken or full stderr still holds: its flush at exit would change the exit code."""
    try:
        sys.stderr.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())


def build_app(only: str | None = None) -> typer.Typer:
    """The command line with all its commands; without those of other modules if ``only`` names a command."""
    app = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Data-parallel training for PyTorch: launch it, watch it, check it against native DDP.",
    )

    def show_version(is_wanted: bool) -> None:
        if is_wanted:
            from psengine.version import __version__

            print(f"psengine {__version__}")
            raise typer.Exit

    @app.callback()
    def root(
        version: bool = typer.Option(
            False, "--version", callback=show_version, is_eager=True, help="Show the version and exit."
        ),
    ) -> None:
        del version

    for module in (only,) if only in COMMANDS else COMMANDS:
        importlib.import_module(f"psengine.cli.{module}").register(app)
    return app


if __name__ == "__main__":
    main()
