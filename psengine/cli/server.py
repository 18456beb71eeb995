"""``psengine-server``: serve, or with ``keygen`` make keys.

Options come from ``ServerSettings``, which also reads ``PSENGINE_*`` variables and a TOML file. Annotations of commands
are evaluated here and now, because typer is imported only once it is known to be there.
"""

import inspect
import logging
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from psengine.environment.extras import require_server_packages
from psengine.errors import MissingExtraError, PSEngineError
from psengine.version import __version__

if TYPE_CHECKING:
    import typer

EXIT_USAGE = 2


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; ends the process with the server's exit code."""
    try:
        require_server_packages("parameter servers", "typer")
    except MissingExtraError as error:
        _end(error)
    _build()(args=None if arguments is None else list(arguments), prog_name="psengine-server")


def _build() -> "typer.Typer":
    import typer

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

    def serve(context: Any, **options: Any) -> None:
        if context.invoked_subcommand is None:
            raise typer.Exit(_serve(options))

    serve.__doc__ = (
        "Keep the parameters of training jobs: a psengine parameter server.\n\nEvery option may also be given as a"
        " variable (PSENGINE_BIND, ...) or in the file of --config. Ends in order on SIGTERM. Exit codes: 0 ended as"
        " told, 2 bad usage or configuration, 3 address taken, 4 snapshots, 5 internal error."
    )
    parameters = _parameters()
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
        _keygen(directory, name)

    app.command()(keygen)
    return app


def _parameters() -> list[inspect.Parameter]:
    """One option per setting, all of them texts that ``ServerSettings.load`` understands, and our own."""
    import typer

    from psengine.parameter_server.server.settings import describe_settings

    found: list[tuple[str, Any, Any]] = [("context", typer.Context, inspect.Parameter.empty)]
    for name, (explanation, default) in describe_settings().items():
        option = f"--{name.replace('_', '-')}"
        if isinstance(default, bool):
            found.append((name, Annotated[bool, typer.Option(option, help=explanation)], False))
        else:
            shown = "" if default is None else f" [default: {default}]"
            metavar = {int: "NUMBER", float: "SECONDS"}.get(type(default), "TEXT")
            annotation = Annotated[str | None, typer.Option(option, metavar=metavar, help=explanation + shown)]
            found.append((name, annotation, None))
    found += [
        (
            "config",
            Annotated[str | None, typer.Option("--config", metavar="FILE", help="TOML file of settings.")],
            None,
        ),
        ("version", Annotated[bool, typer.Option("--version", help="Show the version and exit.")], False),
        ("until_stdin_closes", Annotated[bool, typer.Option("--until-stdin-closes", hidden=True)], False),
        ("announce_fd", Annotated[int | None, typer.Option("--announce-fd", hidden=True)], None),
    ]
    return [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)
        for name, annotation, default in found
    ]


def _serve(options: dict[str, Any]) -> int:
    from psengine.parameter_server.server.daemon import Server, log_start
    from psengine.parameter_server.server.settings import ServerSettings

    if options.pop("version"):
        print(f"psengine-server {__version__}")
        return 0
    until_stdin_closes, announce_fd = options.pop("until_stdin_closes"), options.pop("announce_fd")
    config = options.pop("config")
    # A flag that was not given is for the environment or the file to set.
    given = {name: value for name, value in options.items() if value is not None and value is not False}
    try:
        settings = ServerSettings.load(given, config=config)
    except PSEngineError as error:
        _end(error)
    _log_to_stderr(settings.log_format)

    def announce(line: str) -> None:
        is_ready = line.startswith("psengine-server ready")
        # Each line once, also where one file takes both streams.
        if settings.log_format == "json":
            log_start(line)
        if is_ready or settings.log_format != "json":
            _print(line)
        if announce_fd is not None and is_ready:
            with os.fdopen(announce_fd, "w") as file:
                file.write(line + "\n")

    return Server(settings, until_stdin_closes=until_stdin_closes).run(announce)


def _keygen(directory: str, name: str) -> None:
    from psengine.parameter_server.server.transport.authentication import keygen

    try:
        secret_path, public_path = keygen(directory, name)
    except PSEngineError as error:
        _end(error)
    print(f"{secret_path}  keep secret")
    print(f"{public_path}  give to the other side")


def _log_to_stderr(log_format: str) -> None:
    from psengine.tracing.logging_format import JsonFormatter, TextFormatter

    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    logging.captureWarnings(True)
    root = logging.getLogger()
    root.addHandler(handler)
    root.setLevel(logging.INFO)


def _print(line: str) -> None:
    try:
        print(line, flush=True)
    except OSError:
        # The reader is gone. Text left in the buffer would make the interpreter fail at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _end(error: Exception) -> NoReturn:
    print(f"psengine-server: {error}", file=sys.stderr)
    sys.exit(EXIT_USAGE)


if __name__ == "__main__":
    main()
