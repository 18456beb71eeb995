"""How the ranks meet: torch's rendezvous, with a deadline, and a line in the log while it lasts."""

from __future__ import annotations

import concurrent.futures
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import HashStore, Store
from torch.distributed.rendezvous import rendezvous

from psengine.environment.launchers import Placement
from psengine.environment.threads import begin
from psengine.errors import CollectiveError

logger = logging.getLogger(__name__)

# The log has a line after 5, 10, 20, 40, 80 seconds, and then after each 60.
FIRST_LINE_S = 5.0
# torch's own timeout ends a little late, with a better message than ours.
GRACE_S = 5.0


class Wait:
    """One rank's wait for the others."""

    def __init__(self, placement: Placement, timeout: timedelta) -> None:
        self.placement = placement
        self.timeout_s = timeout.total_seconds()
        self.what = "the other ranks"
        self._started_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._started_s

    @contextmanager
    def in_the_log(self) -> Iterator[None]:
        """Log from time to time what is waited for, as long as the block runs."""
        over = threading.Event()

        def log() -> None:
            at, next_s = self.placement, FIRST_LINE_S
            while not over.wait(max(0.0, next_s - self.elapsed_s)):
                logger.warning(
                    "rank %d of %d (%s) is still waiting for %s at %s, for %.0f s of at most %g s",
                    *(at.rank, at.world_size, at.launcher, self.what, at.init_method, self.elapsed_s, self.timeout_s),
                )
                next_s += min(next_s, 60.0)

        thread = threading.Thread(target=log, name="psengine-rendezvous-log", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def meet(self) -> Store:
        """Return the store that all ranks share.

        Raises:
            RuntimeError, ValueError, OSError: the ranks did not meet, or torch cannot read the init method.
        """
        at = self.placement
        if not at.init_method:
            return HashStore()
        timeout = timedelta(seconds=self.timeout_s)
        # In a thread, which can be left behind: torch waits for ever for a listener that accepts and never answers.
        met = begin(lambda: next(rendezvous(at.init_method, at.rank, at.world_size, timeout=timeout)), "psengine-meet")
        try:
            store: Store = met.result(self.timeout_s + GRACE_S)[0]
            return store
        except concurrent.futures.TimeoutError as error:
            raise OSError("who listens there does not answer as a store of torch.distributed") from error

    def failed(self, error: BaseException) -> CollectiveError:
        """The error to raise where the ranks did not meet: it names the place, what ``error`` said, and the fix."""
        at = self.placement
        first_line = str(error).strip().partition("\n")[0]
        if not at.init_method:
            return CollectiveError(f"The process group of a single process could not be made: {first_line}")
        return CollectiveError(
            f"Rank {at.rank} of {at.world_size} ({at.launcher}) on {socket.gethostname()} could not join the process"
            f" group at {at.init_method} (expected all {at.world_size} ranks to meet there within"
            f" timeout={self.timeout_s:g} s, got after {self.elapsed_s:.1f} s: {first_line}). Fix: check that all ranks"
            " have this address, that its name resolves on every host, that rank 0 runs there, that the port is free"
            " and no firewall closes it; raise timeout where ranks start late. A file must be new, and shared by all."
        )


def ranks_of_this_host(store: Any, rank: int, world_size: int, timeout: timedelta) -> list[int]:
    """Exchange host names with all ranks; return the ranks of this host, ascending. All ranks call it.

    Raises:
        CollectiveError: not all of them did, within the timeout.
    """
    keys = [f"psengine/host/{other}" for other in range(world_size)]
    hostname = socket.gethostname()
    try:
        store.set(keys[rank], hostname)
        store.wait(keys, timeout)
        return [other for other, key in enumerate(keys) if store.get(key).decode() == hostname]
    except (RuntimeError, NotImplementedError) as error:
        raise CollectiveError(
            f"Rank {rank} could not learn who shares its host (expected all {world_size} ranks to call psengine.init()"
            f" within {timeout.total_seconds():g} s, got: {error}). Fix: that, or LOCAL_RANK and LOCAL_WORLD_SIZE."
        ) from error
