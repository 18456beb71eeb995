"""ps-lite as a peer: a program of ours against a checkout of it, and the processes of its job."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from harness.ranks import BENCHMARKS, Rank

NAME = "ps-lite"
MISSING = (
    "No ps-lite to compare with: its row is missing. To get one: apt install g++ libzmq3-dev protobuf-compiler"
    " libprotobuf-dev; clone dmlc/ps-lite; --ps-lite PATH (make bench PS_LITE=PATH)"
)
BUILD_S = 240
END_S = 10


def build(checkout: Path | None, caveat: Callable[[str], None]) -> Path | None:
    """Compile push and pull against the checkout; None, and a caveat, where there is none."""
    if checkout is None:
        return caveat(MISSING)
    program = BENCHMARKS.parent / "build" / "ps_lite" / "ps_lite"
    program.parent.mkdir(parents=True, exist_ok=True)
    source = checkout / "src"
    own = Path(__file__).with_suffix(".cpp")
    sources = [own, *(source / f"{name}.cc" for name in ("customer", "postoffice", "van"))]
    includes = [f"-I{folder}" for folder in (program.parent, source, checkout / "include")]
    libraries = ["-lprotobuf-lite", "-lprotobuf", "-lzmq", "-pthread"]
    generated = program.parent / "meta.pb.cc"
    for command in (
        ["protoc", f"--cpp_out={program.parent}", f"--proto_path={source}", source / "meta.proto"],
        ["g++", "-std=c++17", "-O3", "-march=native", "-w", *includes, *sources, generated, "-o", program, *libraries],
    ):
        subprocess.run(command, timeout=BUILD_S, check=True)
    return program


@contextmanager
def job(program: Path | None, workers: int) -> Iterator[str]:
    """Start the scheduler and a server; yield what a worker needs to join them, an empty string without a program."""
    if program is None:
        yield ""
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"{program} {workers} {free.getsockname()[1]}"
    processes = [_start(address, role) for role in ("scheduler", "server")]
    try:
        yield address
    finally:
        for process in processes:
            _end(process)


def _start(address: str, role: str, **options: Any) -> subprocess.Popen[str]:
    program, workers, port = address.rsplit(" ", 2)
    settings = {"DMLC_NUM_WORKER": workers, "DMLC_NUM_SERVER": "1", "DMLC_ROLE": role}
    settings |= {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": port, "DMLC_NODE_HOST": "127.0.0.1"}
    return subprocess.Popen([program], env={**os.environ, **settings}, text=True, **options)


def _end(process: subprocess.Popen[str]) -> None:
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class Worker:
    """Drives a worker through its pipes: two lines more than its own time, some tens of microseconds."""

    def __init__(self, address: str, rank: Rank, chunk_numels: Sequence[int]) -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._process = _start(address, "worker", **pipes)
        self._write(" ".join(map(str, [len(chunk_numels), *chunk_numels])) + "\n")

    def _write(self, text: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(text)
        self._process.stdin.flush()

    def push_pull(self, chunks: Sequence[Any]) -> None:
        """Of gradients of the program's own, of the chunks' sizes."""
        assert self._process.stdout is not None
        self._write("\n")
        if not self._process.stdout.readline():
            raise RuntimeError("ps-lite's worker ended; its error is above")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        _end(self._process)
