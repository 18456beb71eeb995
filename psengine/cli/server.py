"""``psengine-server``: serve; make keys; look at, and copy, what a server keeps.

Options are the fields of ``ServerSettings``: an option beats a ``PSENGINE_*`` variable.
"""

import importlib
import inspect
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from psengine.cli.main import command_line, give_up_unwritable, version_option
from psengine.errors import SnapshotError

if TYPE_CHECKING:
    from psengine.parameter_server.server.settings import ServerSettings


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; ends the process with the server's exit code."""
    with command_line("psengine-server"):
        arguments = sys.argv[1:] if arguments is None else list(arguments)
        if arguments == ["--arguments-from-stdin"]:
            arguments = _read_arguments()
        build_app(_serve)(args=arguments, prog_name="psengine-server")


def _read_arguments() -> list[str]:
    """The command line that whoever started this process gives it once it is known; meanwhile import the server."""
    importlib.import_module("psengine.parameter_server.server.daemon")
    line = sys.stdin.readline()
    if not line:
        sys.exit()  # nobody needs this server
    arguments: list[str] = json.loads(line)
    return arguments


def build_app(run: "Callable[[ServerSettings, bool], int]") -> typer.Typer:
    """The command line.

    Args:
        run: serves, given the settings and ``--until-stdin-closes``; returns the exit code.
    """
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

    def serve(
        context: typer.Context,
        *,
        version: Annotated[bool, version_option("psengine-server")] = False,
        until_stdin_closes: Annotated[bool, typer.Option("--until-stdin-closes", hidden=True)] = False,
        **options: Any,
    ) -> None:
        if context.invoked_subcommand is not None:
            return
        from psengine.parameter_server.server.settings import make_settings

        given = {name: value for name, value in options.items() if value is not None}
        raise typer.Exit(run(make_settings(given), until_stdin_closes))

    serve.__doc__ = (
        "Keep the parameters of training jobs: a psengine parameter server.\n\nEvery option may also be given as a"
        " variable (PSENGINE_BIND, ...). Ends in order on SIGTERM. Exit codes: 0 ended as"
        " told, 130 after Ctrl-C, 2 bad usage or configuration, 3 address taken, 4 snapshots, 5 internal error."
    )
    first, *others, _ = inspect.signature(serve).parameters.values()
    parameters = [first, *_settings(), *others]
    serve.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    serve.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    app.callback(invoke_without_command=True)(serve)

    def keygen(
        directory: Annotated[str, typer.Argument(help="Where the files go; made if absent.")],
        name: Annotated[str, typer.Option("--name", help="What the files are called.")],
    ) -> None:
        """Make a CURVE key pair: NAME.key for its owner alone, NAME.pub for the others.

        The server needs its own pair (--curve-key server.key) and the .pub files of all clients (--allow DIRECTORY);
        a client needs its own pair and the server's .pub file.
        """
        from psengine.parameter_server.server.transport.authentication import keygen

        secret_path, public_path = keygen(directory, name)
        print(f"{secret_path}  keep secret")
        print(f"{public_path}  give to the other side")

    def inspect_directory(directory: Annotated[str, typer.Argument(help="A server's --snapshot-dir.")]) -> None:
        """List what a directory holds, and what a server would start with. Changes nothing; its server may run."""
        from psengine.parameter_server.server.durability.inspection import inspect

        _print_lines(inspect(Path(directory)))

    def backup(
        directory: Annotated[str, typer.Argument(help="A server's --snapshot-dir.")],
        target: Annotated[str, typer.Argument(help="Where the copy goes; made, so it must not be there.")],
    ) -> None:
        """Copy a directory for a server to start from, while its own server runs, and read the copy."""
        from psengine.parameter_server.server.durability.inspection import back_up

        _print_lines(back_up(Path(directory), Path(target)))

    app.command()(keygen)
    app.command("inspect")(inspect_directory)
    app.command()(backup)
    return app


def _print_lines(lines: Iterator[str]) -> None:
    try:
        for line in lines:
            print(line)
    except OSError as error:
        raise SnapshotError(f"{error.filename}: {error.strerror}") from error


def _settings() -> Iterator[inspect.Parameter]:
    """An option for each setting; ``make_settings`` checks the values."""
    from psengine.parameter_server.server.settings import ENVIRONMENT_PREFIX, ServerSettings

    for name, setting in ServerSettings.model_fields.items():
        default = "" if setting.default is None else f"  [default: {setting.default}]"
        variable = ENVIRONMENT_PREFIX + name.upper()
        text = f"{setting.description}  [variable: {variable}]{default}"
        flag, kind = f"--{name.replace('_', '-')}", bool if setting.annotation is bool else str
        metavar = None if kind is bool else "VALUE"
        option = typer.Option(flag, help=" ".join(text.split()), metavar=metavar, envvar=variable, show_envvar=False)
        options = {"annotation": Annotated[kind | None, option], "default": None}
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, **options)


def _serve(settings: "ServerSettings", until_stdin_closes: bool) -> int:
    from psengine.parameter_server.server.daemon import Server, log_start

    _log_to_stderr(settings.log_format)

    def announce(line: str) -> None:
        # Each line once, also where one file takes both streams.
        if settings.log_format == "json":
            log_start(line)
        if settings.log_format != "json" or line.startswith("psengine-server ready"):
            with suppress(OSError):  # the reader is gone
                print(line)
            give_up_unwritable(sys.stdout)

    return Server(settings, until_stdin_closes=until_stdin_closes).run(announce)


def _log_to_stderr(log_format: str) -> None:
    from psengine.tracing.logging_format import JsonFormatter, TextFormatter

    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.captureWarnings(True)
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)


if __name__ == "__main__":
    main()
