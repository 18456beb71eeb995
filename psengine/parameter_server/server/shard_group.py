"""A server's shards, each in a thread of its own, asked together from other threads.

ask ──► shard 0's queue ─► between two messages ─► future ──┐
    └─► shard 1's queue ─► ...                  ─► future ──┴─► results, or TimeoutError after one deadline
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from functools import partial
from typing import TypeVar

from psengine.parameter_server.server.core.shard import Shard
from psengine.parameter_server.server.transport.shard_thread import LAST_MESSAGES_S, ShardEndedError, ShardThread
from psengine.parameter_server.status_model import MuteShard, ShardStatus

ANSWER_DEADLINE_S = 3.0
# A shard that does not tick for so long is unhealthy; copying a large model for a snapshot takes a second.
HEALTHY_S = 10.0

_Result = TypeVar("_Result")


class ShardGroup:
    """The shards' threads; ``start`` adds one. Callable from any thread."""

    def __init__(self) -> None:
        self.threads: list[ShardThread] = []

    def start(self, thread: ShardThread) -> None:
        """Add a shard, and let it serve."""
        self.threads.append(thread)
        thread.start()

    # ---- questions ---------------------------------------------------------------------------------------------

    def ask(self, function: Callable[[Shard], _Result]) -> list[_Result]:
        """Call ``function`` with every shard, in the shard's thread; the results.

        Raises:
            concurrent.futures.TimeoutError: a shard did not answer; it does what it was asked as soon as it can.
            ShardEndedError: a shard's thread has ended.
        """
        return _results([thread.ask(partial(function, thread.shard)) for thread in self.threads])

    def status(self) -> tuple[ShardStatus | MuteShard, ...]:
        """Each shard's status, or why there is none."""
        futures = [(thread, thread.ask(thread.status)) for thread in self.threads]
        deadline_s = time.monotonic() + ANSWER_DEADLINE_S
        return tuple(_status_of(thread, future, deadline_s) for thread, future in futures)

    @property
    def are_alive(self) -> bool:
        """Whether every thread lives."""
        return all(thread.is_alive() for thread in self.threads)

    @property
    def are_healthy(self) -> bool:
        """Whether every thread lives and ticks."""
        now_s = time.monotonic()
        return all(thread.is_alive() and now_s - thread.last_tick_s < HEALTHY_S for thread in self.threads)

    def training_count(self) -> int:
        """Workers at the shard with most of them, without those that wait for a job's first values; 1 likewise."""
        return self._most(lambda shard: shard.jobs.training_count)

    def _most(self, count: Callable[[Shard], int]) -> int:
        try:
            return max(self.ask(count))
        except (FutureTimeoutError, ShardEndedError):
            return 1

    # ---- orders ------------------------------------------------------------------------------------------------

    def evict(self, job: str, rank: int) -> bool:
        """End a worker's lease at every shard; whether any knew the worker.

        Raises:
            concurrent.futures.TimeoutError: a shard is busy; it ends the lease as soon as it can.
        """
        return any(_results([thread.ask(partial(thread.evict, job, rank)) for thread in self.threads]))

    def forget(self, job: str, begin_snapshot: Callable[[], object]) -> int | None:
        """Drop a job without workers at every shard; how many workers keep it, None where no shard knows it.

        Args:
            job: its name.
            begin_snapshot: begins a snapshot, so that the job is gone from disk too.

        Raises:
            concurrent.futures.TimeoutError: a shard is busy.
        """
        known = [count for count in self.ask(lambda shard: shard.worker_count(job)) if count is not None]
        if not known or any(known):
            return max(known, default=None)
        forgotten = [thread.ask(partial(Shard.forget, thread.shard, job)) for thread in self.threads]
        # A crash before the next interval would restore the job. Shards call functions in the order of asking.
        begin_snapshot()
        _results(forgotten)
        return 0

    def close(self) -> int:
        """Let no more workers in, see ``Shard.close``; how many there are at the shard with most of them.

        Raises:
            concurrent.futures.TimeoutError: a shard is busy; it does so as soon as it can.
        """
        return max(self.ask(Shard.close))

    def remembered_count(self) -> int:
        """Workers at the shard with most of them, see ``ShardJobs``; 1 where a shard does not answer."""
        return self._most(lambda shard: shard.jobs.remembered_count)

    def drain(self) -> list[int]:
        """Refuse newcomers and answer queued messages; the indexes of shards that did not finish in time."""
        for thread in self.threads:
            thread.drain()
        return [t.shard.index for t in self.threads if not t.drained.wait(LAST_MESSAGES_S + 1.0)]

    def end(self) -> None:
        """End the threads."""
        for thread in self.threads:
            thread.end()
        for thread in self.threads:
            thread.join(timeout=2.0)


def _status_of(thread: ShardThread, future: Future[ShardStatus], deadline_s: float) -> ShardStatus | MuteShard:
    try:
        return future.result(max(0.0, deadline_s - time.monotonic()))
    except FutureTimeoutError:
        future.cancel()
        return MuteShard(index=thread.shard.index, error=f"no answer within {ANSWER_DEADLINE_S:g} s")
    except ShardEndedError as error:
        return MuteShard(index=thread.shard.index, error=str(error))


def _results(futures: Sequence[Future[_Result]]) -> list[_Result]:
    deadline_s = time.monotonic() + ANSWER_DEADLINE_S
    return [future.result(max(0.0, deadline_s - time.monotonic())) for future in futures]
