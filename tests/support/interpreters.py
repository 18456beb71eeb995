"""Main programs in interpreters that end as interpreters do, threads and atexit included, without importing torch anew.

One process imports torch and forks; a child runs its program at the top of its stack, as ``python program.py`` would,
and then leaves it, so that Python finalizes. (Children of multiprocessing leave by os._exit.)
"""

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from typing_extensions import override

from support.running import Running

_ORIGIN = """
import gc, json, os, sys
import torch, torch.distributed

gc.freeze()
for line in sys.stdin:
    request = json.loads(line)
    if "reap" in request:
        pid, status = os.waitpid(request["reap"], os.WNOHANG)
        print(json.dumps(os.waitstatus_to_exitcode(status) if pid else None), flush=True)
        continue
    pid = os.fork()
    if pid == 0:
        break
    print(pid, flush=True)
else:
    os._exit(0)
for number, path in enumerate(["/dev/null", request["stdout"], request["stderr"]]):
    os.dup2(os.open(path, os.O_RDWR | os.O_APPEND), number)
sys.stdin = open(0)
os.environ.clear()
os.environ.update(request["environment"])
sys.path[:0] = request["environment"].get("PYTHONPATH", "").split(os.pathsep)
sys.argv = ["program.py"]
torch.set_num_threads(1)
del line, pid, number, path
exec(compile(request["program"], "program.py", "exec"), globals())
"""
_origin: subprocess.Popen[str] | None = None


def _ask(**request: Any) -> Any:
    global _origin
    if _origin is None:
        _origin = subprocess.Popen(
            [sys.executable, "-c", _ORIGIN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        atexit.register(_origin.kill)
    assert _origin.stdin is not None
    assert _origin.stdout is not None
    _origin.stdin.write(json.dumps(request) + "\n")
    _origin.stdin.flush()
    return json.loads(_origin.stdout.readline())


class Interpreter(Running):
    """A running program.

    Attributes:
        pid: of its process.
    """

    def __init__(self, program: str, environment: Mapping[str, str], directory: Path) -> None:
        super().__init__("the program", directory)
        files = {name: directory / name for name in ("stdout", "stderr")}
        for path in files.values():
            path.touch()
        self._exit_code: int | None = None
        named = {name: str(path) for name, path in files.items()}
        self.pid: int = _ask(program=program, environment=dict(environment), **named)

    @override
    def poll(self) -> int | None:
        if self._exit_code is None:
            self._exit_code = _ask(reap=self.pid)
        return self._exit_code

    @override
    def signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        if self.poll() is None:
            os.kill(self.pid, number)


@contextlib.contextmanager
def running_program(program: str, environment: Mapping[str, str]) -> Iterator[Interpreter]:
    """``program`` as a main program with this environment; gone with the context."""
    with tempfile.TemporaryDirectory(prefix="psengine-program-") as directory:
        interpreter = Interpreter(program, environment, Path(directory))
        try:
            yield interpreter
        finally:
            interpreter.signal(signal.SIGKILL)
            interpreter.wait()
