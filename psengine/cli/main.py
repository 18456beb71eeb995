"""``psengine``: launch, watch, debug and check data-parallel training. One module per command."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from psengine.errors import PSEngineError
from psengine.extras import missing_extra

if TYPE_CHECKING:
    import typer

EXIT_USAGE = 2
# Each has register(app), which adds its commands; in the order of --help.
COMMANDS = ("run", "verify", "status", "doctor", "advise", "bench")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; ends the process with the command's exit code.

    What is wrong with an argument or its place (``PSEngineError``) is one message and exit code 2, never a traceback.
    """
    try:
        app = build_app()
        app(args=None if arguments is None else list(arguments), prog_name="psengine")
    except PSEngineError as error:
        print(f"psengine: {error}", file=sys.stderr)
        sys.exit(EXIT_USAGE)


def build_app() -> typer.Typer:
    """The command line with all its commands.

    Raises:
        MissingExtraError: typer or rich is not installed.
    """
    try:
        import rich  # noqa: F401
        import typer
    except ImportError as error:
        raise missing_extra("the psengine command's pages", error, extra="cli") from error
    app = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Data-parallel training for PyTorch: launch it, watch it, check it against native DDP.",
    )

    def show_version(wanted: bool) -> None:
        if wanted:
            from psengine import __version__

            print(f"psengine {__version__}")
            raise typer.Exit

    def root(
        version: bool = typer.Option(
            False, "--version", callback=show_version, is_eager=True, help="Say the version and end."
        ),
    ) -> None:
        """Data-parallel training for PyTorch: launch it, watch it, check it against native DDP."""

    root.__annotations__["version"] = bool
    root.__annotations__["return"] = None
    app.callback()(root)
    for command in COMMANDS:
        importlib.import_module(f"psengine.cli.{command}").register(app)
    return app


if __name__ == "__main__":
    main()
