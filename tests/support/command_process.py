"""The one way tests start the ``psengine`` command: a real process, signals, its output in files, always ended."""

import importlib
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from typing_extensions import override

from support.process_table import children_of, command_line
from support.processes import forkserver
from support.running import Running

SUPPORT = Path(__file__).parent
WORKER = str(SUPPORT / "launched_worker.py")


class RunningCommand(Running):
    """``psengine`` with arguments, in a process of its own."""

    def __init__(self, process: Any, directory: Path) -> None:
        super().__init__("the command", directory)
        self._process = process
        self.pid: int = process.pid

    @override
    def poll(self) -> int | None:
        return self._process.exitcode

    @override
    def signal(self, number: int) -> None:
        os.kill(self.pid, number)


@contextmanager
def running_command(
    arguments: Sequence[str],
    *,
    environment: dict[str, str] | None = None,
    prepare: Callable[[], None] | None = None,
    module: str = "psengine.cli.main",
) -> Iterator[RunningCommand]:
    """Run ``psengine`` as the shell would, forked from a process that has imported torch; there, ``prepare`` first.

    Args:
        module: of the command; ``running_server_command`` names psengine-server's.
    """
    with tempfile.TemporaryDirectory(prefix="psengine-command-") as directory:
        for name in ("stdout", "stderr"):
            (Path(directory) / name).touch()
        # Programs of tests/support import their neighbours.
        path = os.pathsep.join(filter(None, (str(SUPPORT.parent), os.environ.get("PYTHONPATH"))))
        variables = {**os.environ, "PYTHONPATH": path, **(environment or {})}
        process = forkserver.Process(target=_main, args=(module, list(arguments), variables, directory, prepare))
        process.start()
        try:
            yield RunningCommand(process, Path(directory))
        finally:
            if process.is_alive():
                # Twice: at once, and with all that it started.
                for _ in range(2):
                    os.kill(process.pid or 0, signal.SIGTERM)
                    process.join(timeout=5)
                    if not process.is_alive():
                        break
                else:
                    process.kill()
            process.join(timeout=10)
            process.close()


def running_server_command(arguments: Sequence[str], **options: Any) -> AbstractContextManager[RunningCommand]:
    """``running_command`` for ``psengine-server``."""
    return running_command(arguments, module="psengine.cli.server", **options)


def run_command(arguments: Sequence[str], *, environment: dict[str, str] | None = None) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of ``psengine`` with ``arguments``."""
    with running_command(arguments, environment=environment) as command:
        return command.wait(), command.stdout, command.stderr


def servers_of(pid: int) -> list[int]:
    """Parameter servers that ``pid`` started."""
    return [child for child in children_of(pid) if "-m psengine.cli.server" in command_line(child)]


def _main(
    module: str,
    arguments: list[str],
    environment: dict[str, str],
    directory: str,
    prepare: Callable[[], None] | None,
) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{directory}/{name}", os.O_WRONLY | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    main = importlib.import_module(module).main
    if prepare is not None:
        prepare()
    code: Any = 0
    try:
        main(arguments)
    except SystemExit as end:
        code = end.code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else 1)
