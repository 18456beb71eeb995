"""``psengine``: launch, watch, debug and check data-parallel training. One module per command."""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated, Any, TextIO

import typer

from psengine.errors import PSEngineError
from psengine.version import __version__

EXIT_USAGE, EXIT_INTERRUPTED = 2, 128 + signal.SIGINT
# Each has a module, whose register(app) adds the command.
COMMANDS = ("run", "verify", "status", "admin", "replay", "doctor", "advise")


class InterruptedCommand(BaseException):
    """Ctrl-C; not a KeyboardInterrupt, of which typer makes an exit code without a word."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; ends the process with the command's exit code."""
    with command_line("psengine"):
        arguments = sys.argv[1:] if arguments is None else list(arguments)
        build_app(arguments[0] if arguments else None)(args=arguments, prog_name="psengine")


@contextmanager
def command_line(name: str) -> Iterator[None]:
    """End the process with one line and 2 at a PSEngineError, with one line and 130 after Ctrl-C.

    Ctrl-C unwinds the block, a second one what unwinds. Threads that still wait for an answer are not waited for.
    """

    def interrupt(number: int, frame: object) -> None:
        raise InterruptedCommand

    previous = signal.getsignal(signal.SIGINT)
    if previous is not signal.SIG_IGN:  # as under nohup, or in the background of a shell
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    except PSEngineError as error:
        _say(f"{name}: {error}")
        sys.exit(EXIT_USAGE)
    except InterruptedCommand:
        _say(f"{name}: interrupted")
        give_up_unwritable(sys.stderr)
        os._exit(EXIT_INTERRUPTED)
    finally:
        give_up_unwritable(sys.stderr)
        signal.signal(signal.SIGINT, previous)


def _say(line: str) -> None:
    with suppress(OSError):
        print(line, file=sys.stderr)


def give_up_unwritable(stream: TextIO) -> None:
    """Drop what a broken or full stream still holds: its flush at exit would change the exit code."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def build_app(only: str | None = None) -> typer.Typer:
    """The command line with all its commands; without those of other modules if ``only`` names a command."""
    app = typer.Typer(
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Data-parallel training for PyTorch: launch it, watch it, check it against native DDP.",
    )

    @app.callback()
    def root(version: Annotated[bool, version_option("psengine")] = False) -> None:
        del version

    for module in (only,) if only in COMMANDS else COMMANDS:
        importlib.import_module(f"psengine.cli.{module}").register(app)
    return app


def version_option(program: str) -> Any:
    """The option ``--version`` of a command line."""

    def show(is_wanted: bool) -> None:
        if is_wanted:
            print(f"{program} {__version__}")
            raise typer.Exit

    return typer.Option("--version", callback=show, is_eager=True, help="Show the version and exit.")


if __name__ == "__main__":
    main()
