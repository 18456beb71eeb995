"""A disk that fills up under a server, and has room again: what is acknowledged meanwhile, and lost by a kill."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from harness.tables import Table
from support.server_process import APPLY, SGD, running_server
from support.waiting import eventually

from psengine.parameter_server.client.options import READER_RULE, SessionOptions
from psengine.parameter_server.client.worker_session import WorkerSession, wait_all
from psengine.protocol.layout import ChunkKind, ChunkSpec, Segment

DISK_MIB = 16
NUMEL = 4096
FULL_S = 5.0
DEADLINE_S = 60.0
COLUMNS = ["tier", "pushes acknowledged", "of them while the disk was full", "said in the log", "went on after s",
           "lost by a kill", "doubled"]  # fmt: skip


@contextlib.contextmanager
def small_disk() -> Iterator[Path]:
    """A tmpfs of a few MiB; needs root."""
    with tempfile.TemporaryDirectory(prefix="psengine-full-") as folder:
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", folder], check=True)
        try:
            yield Path(folder)
        finally:
            subprocess.run(["umount", "-l", folder], check=True)


class Pusher(threading.Thread):
    """Pushes of a one in every element, until it is told to stop."""

    def __init__(self, session: WorkerSession) -> None:
        super().__init__(daemon=True)
        self._session = session
        self.acknowledged = 0
        self.is_over = threading.Event()
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            while not self.is_over.is_set():
                self._session.push(0, torch.ones(NUMEL), []).wait()
                self.acknowledged += 1
        except BaseException as error:
            self.failure = error

    def await_more(self, than: int) -> float:
        """Seconds until more pushes than that are acknowledged."""
        began_s = time.monotonic()
        while self.acknowledged <= than:
            assert self.failure is None, self.failure
            assert time.monotonic() < began_s + DEADLINE_S, "pushes did not go on"
            time.sleep(0.01)
        return time.monotonic() - began_s


def _fill(folder: Path) -> None:
    with (folder / "ballast").open("ab", buffering=0) as ballast:
        for size in (1 << 16, 1 << 10, 1):
            try:
                while True:
                    ballast.write(bytes(size))
            except OSError:
                continue


def _fill_one(tier: str) -> list[Any]:
    with small_disk() as folder, tempfile.TemporaryDirectory(prefix="psengine-full-") as sockets:
        address = f"ipc://{sockets}/socket"
        options = {"bind": address, "snapshot_dir": folder / "s", "durability": tier, "snapshot_interval_s": 0.5}
        layout = [ChunkSpec(0, ChunkKind.PARAMETER, torch.float32, NUMEL, (Segment("p", (NUMEL,), (1,), 0, NUMEL),))]
        with running_server(**options) as server:
            who = SessionOptions(
                addresses=(address,), job="job", rule=APPLY, rank=0, world_size=1, timeout_s=DEADLINE_S
            )
            session = WorkerSession(who)
            session.start()
            session.enter(layout, lambda one: torch.zeros(one.numel))
            body = {"optimizer": "SGD", "groups": [{**SGD, "lr": 1.0}], "runs": [[0, NUMEL, 0]]}
            wait_all([session.configure(0, body)])
            pusher = Pusher(session)
            pusher.start()
            pusher.await_more(20)
            # Without a first snapshot there would be no job to come back.
            eventually(lambda: server.status()["snapshot"]["generation"], "a snapshot")
            _fill(folder)
            before = pusher.acknowledged
            # Snapshots make room and take it again: the disk is kept full.
            end_s = time.monotonic() + FULL_S
            while time.monotonic() < end_s:
                time.sleep(0.05)
                _fill(folder)
            meanwhile = pusher.acknowledged - before
            said = [line for line in server.log().splitlines() if "disk is full" in line or "No space left" in line]
            (folder / "ballast").unlink()
            went_on_s = pusher.await_more(pusher.acknowledged)
            pusher.await_more(pusher.acknowledged + 50)
            pusher.is_over.set()
            pusher.join(timeout=DEADLINE_S)
            server.kill()
        with running_server(**options), contextlib.closing(session):
            reader = SessionOptions(addresses=(address,), job="job", rule=READER_RULE, role="reader")
            with WorkerSession(reader) as looking:
                looking.layout()
                values = looking.pull(0).wait().values
        assert values is not None
        there = round(-values[0].item())
        assert torch.equal(values, torch.full((NUMEL,), -float(there)))
        return [tier, pusher.acknowledged, meanwhile, len(said), f"{went_on_s:.2f}",
                max(0, pusher.acknowledged - there), max(0, there - pusher.acknowledged)]  # fmt: skip


def fill_disks(tiers: list[str]) -> Table:
    """A row for each tier."""
    if os.geteuid() != 0:
        return Table("not run: only root mounts a small disk", COLUMNS, [])
    return Table(f"{DISK_MIB} MiB, full for {FULL_S:g} s", COLUMNS, [_fill_one(tier) for tier in tiers])
