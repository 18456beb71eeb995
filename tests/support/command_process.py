"""The one way tests start the ``psengine`` command: a real process, signals, its output in files, always ended."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from support.process_table import children_of, command_line
from support.processes import forkserver

SUPPORT = Path(__file__).parent
WORKER = str(SUPPORT / "launched_worker.py")
DEADLINE_S = 60.0


class RunningCommand:
    """``psengine`` with arguments, in a process of its own."""

    def __init__(self, process: Any, directory: Path) -> None:
        self._process = process
        self._directory = directory
        self.pid: int = process.pid

    @property
    def stdout(self) -> str:
        return (self._directory / "stdout").read_text(errors="replace")

    @property
    def stderr(self) -> str:
        return (self._directory / "stderr").read_text(errors="replace")

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def wait(self, timeout_s: float = DEADLINE_S) -> int:
        """Its exit code; negative for a signal."""
        self._process.join(timeout=timeout_s)
        code = self._process.exitcode
        assert code is not None, f"the command still ran after {timeout_s:g} s\n{self.stdout}\n{self.stderr}"
        return int(code)

    def wait_until(self, condition: Callable[[], Any], timeout_s: float = DEADLINE_S) -> Any:
        """What ``condition`` returns, once it is true."""
        deadline_s = time.monotonic() + timeout_s
        while not (found := condition()):
            state = f"{self.stdout}\n{self.stderr}"
            assert self._process.is_alive(), f"the command has ended\n{state}"
            assert time.monotonic() < deadline_s, f"still not so after {timeout_s:g} s\n{state}"
            time.sleep(0.05)
        return found


@contextmanager
def running_command(
    arguments: Sequence[str],
    *,
    environment: dict[str, str] | None = None,
    prepare: Callable[[], None] | None = None,
    module: str = "psengine.cli.main",
    descriptor: int | None = None,
) -> Iterator[RunningCommand]:
    """Run ``psengine`` as the shell would, forked from a process that has imported torch; there, ``prepare`` first.

    Args:
        module: of the command; ``running_server_command`` names psengine-server's.
        descriptor: one to inherit; its number in the command's process is the last argument.
    """
    with tempfile.TemporaryDirectory(prefix="psengine-command-") as directory:
        for name in ("stdout", "stderr"):
            (Path(directory) / name).touch()
        variables = {**os.environ, **(environment or {})}
        # Connections are how descriptors travel to a forkserver's child.
        inherited = None if descriptor is None else Connection(os.dup(descriptor), readable=False)
        process = forkserver.Process(
            target=_main, args=(module, list(arguments), variables, directory, prepare, inherited)
        )
        process.start()
        if inherited is not None:
            inherited.close()
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
    inherited: Connection | None,
) -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        os.dup2(os.open(f"{directory}/{name}", os.O_WRONLY | os.O_APPEND), number)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if inherited is not None:
        arguments = [*arguments, str(os.dup(inherited.fileno()))]
        inherited.close()
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
