"""Power cuts: whatever a server has not made durable by an fsync is gone.

    snapshots and logs ── ext4 on a loop device ── an image in memory
    cut = the image as it is now, copied; the server is killed and starts again on the copy

What the server has written and the kernel still holds has not come to the image. What its own fsyncs brought there has.
The server is stopped while the image is copied, outside of any fsync, and ext4 commits nothing by itself (commit=300).
"""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from attacks.kill_loop import AsyncTrial, Counters, servers_of, until
from support.server_process import ServerProcess

IMAGE_BYTES = 192 << 20
MEMORY = Path("/dev/shm")


class Disk:
    """An ext4 disk whose power can be cut."""

    def __init__(self, folder: Path) -> None:
        self._image = folder / "image"
        self.directory = folder / "disk"
        self.directory.mkdir()
        with self._image.open("wb") as image:
            image.truncate(IMAGE_BYTES)
        _run("mkfs.ext4", "-q", "-F", str(self._image))
        self._mount()

    def _mount(self) -> None:
        _run("mount", "-o", "loop,commit=300,data=ordered", str(self._image), str(self.directory))

    def unmount(self) -> None:
        for _ in range(50):
            if subprocess.run(["umount", str(self.directory)], capture_output=True).returncode == 0:
                return
            time.sleep(0.1)
        _run("umount", "-l", str(self.directory))

    def cut(self, server: ServerProcess) -> None:
        """The server is gone, and so is what had not reached the disk."""
        server.signal(signal.SIGSTOP)
        while _is_writing(server.pid):
            time.sleep(0.001)
        left = self._image.with_name("left")
        shutil.copyfile(self._image, left)
        server.kill()
        self.unmount()
        left.replace(self._image)
        self._mount()


def _is_writing(pid: int) -> bool:
    """Whether a thread runs, or is inside of a system call that cannot be interrupted, such as fsync."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        state = (task / "stat").read_text().rpartition(")")[2].split()[0]
        if state in "RD":
            return True
    return False


def _run(*command: str) -> None:
    subprocess.run(command, capture_output=True, text=True, check=True)


@contextmanager
def disk() -> Iterator[Disk]:
    """A disk that goes with this context; only root mounts a loop device."""
    with tempfile.TemporaryDirectory(prefix="psengine-power-", dir=MEMORY if MEMORY.is_dir() else None) as folder:
        made = Disk(Path(folder))
        try:
            yield made
        finally:
            made.unmount()


def cut_power(tries: int, seed: int, tier: str, most_s: float) -> Counters:
    """``tries`` power cuts of a server whose durability is ``tier``; fewer in ``most_s``."""
    chooser = random.Random(seed)
    with disk() as made, ExitStack() as context:
        trial = AsyncTrial(context, servers_of(made.directory, tier, 1)(context), chooser, made.cut)
        for _ in until(most_s, range(tries)):
            trial.kill_server()
        return trial.counters
