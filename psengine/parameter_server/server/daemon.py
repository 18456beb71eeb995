"""A server process: start-up, main loop, shutdown.

    main thread      signals, watchdog, health, memory ──────────────────────────────────┐
    shard threads    one each: socket ► shard (the first: or coordinators) ► socket      ├─ nothing shared but queues
    snapshot thread  asks the shards for copies, writes a generation                     │
    replication      of a server that follows, or is followed; asks the elector          │
    authenticator    decides who may connect             status port HTTP for people ─────┤
    doorkeeper       bounds the connections ──────────────────────────────────────────────┘

The first SIGTERM or SIGINT ends it in order: it refuses newcomers, answers queued messages, and writes a snapshot. One
that comes within 2 s is the same stop. A later one ends it at once: what came after the last snapshot is lost, and no
written snapshot is harmed.

A *life* of a server is what it holds, under one epoch. Its process may have several: where another server leads, or a
copy of it is not up to date any more, what is here is thrown away, and a new life begins at the same addresses.

Operators' orders (ADMIN) are performed in threads of their own: they ask the shards, which must not wait for
themselves.
"""

from __future__ import annotations

import importlib
import logging
import math
import os
import resource
import secrets
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, TypeVar

import torch
import zmq

from psengine.environment.local_sockets import is_loopback, remove_stale_sockets, socket_beside
from psengine.environment.processes import SAME_STOP_S, has_exited, machine_memory_bytes, resident_bytes
from psengine.environment.variables import read_variable
from psengine.errors import ConfigurationError, ProtocolError, SnapshotError
from psengine.kernels.freed_memory import keep_freed_memory
from psengine.parameter_server.server.coordinator.coordinator import Interfaces
from psengine.parameter_server.server.coordinator.coordinators import Coordinators
from psengine.parameter_server.server.durability.tier import Durability
from psengine.parameter_server.server.interfaces import ShardSettings
from psengine.parameter_server.server.replication.election import Member
from psengine.parameter_server.server.replication.pair import Pair
from psengine.parameter_server.server.replication.replication import Replication, make_elector
from psengine.parameter_server.server.replication.succession import Succession
from psengine.parameter_server.server.settings import ServerSettings
from psengine.parameter_server.server.shard.shard import Shard
from psengine.parameter_server.server.transport.authentication import Authenticator
from psengine.parameter_server.server.transport.endpoint import LINGER_MS, UNREAD_BYTES, BindError, Endpoint
from psengine.parameter_server.server.transport.peers import MAX_DESCRIPTORS, Doorkeeper
from psengine.parameter_server.server.transport.shard_thread import LAST_MESSAGES_S, ShardEndedError, ShardThread
from psengine.protocol.bounds import KEY_BYTES
from psengine.protocol.layout import job_number
from psengine.protocol.messages import ErrorCode, Message
from psengine.status_port.http_status import HttpStatus
from psengine.status_port.overview import merge_jobs
from psengine.status_port.pages import server_pages
from psengine.status_port.status_model import Event, ServerFacts, ServerStatus, ShardStatus
from psengine.tracing.logging_format import RateLimit
from psengine.version import __version__

logger = logging.getLogger(__name__)

EXIT_SNAPSHOT, EXIT_INTERNAL = 4, 5
_EXIT_CODES: dict[type[Exception], int] = {ConfigurationError: 2, BindError: 3, SnapshotError: EXIT_SNAPSHOT}

LOOP_S = 0.1
MAX_ORDERS_AT_ONCE = 4
LAST_SNAPSHOT_S = 600.0
# Less than an operator waits; a snapshot that takes longer is written all the same.
ORDERED_SNAPSHOT_S = 6.0
# What may be resident beyond what shards know of: copies for a snapshot, scratch space, messages that are not complete.
UNACCOUNTED_BYTES = 1 << 30
LOOK_S = 1.0  # how often the service manager is told that all is well, and memory is looked at
ANSWER_DEADLINE_S = 3.0
# A shard that does not tick for so long is unhealthy; copying a large model for a snapshot takes a second.
HEALTHY_S = 10.0
# By a second signal, under durability memory and snapshot.
_LOST = {"memory": "all that this server has", "snapshot": "what came after the last complete snapshot"}
_Result = TypeVar("_Result")
MAX_EVENTS = 200
# A refused gradient comes with hundreds of chunks a second, and a disk stays full for days: the last one stays, with
# how many were like it.
_MERGED = frozenset({"refused", "memory", "connections", "stood_still", "snapshot", "snapshot_failed", "waits"})
_LOGGED = {
    **dict.fromkeys(("snapshot", "leads", "follower", "forgotten"), logging.INFO),
    **dict.fromkeys(("evicted", "fenced", "lost", "stood_still", "log_room", "draining"), logging.WARNING),
    **dict.fromkeys(("follower_lost", "anew", "waits", "connections"), logging.WARNING),
    **dict.fromkeys(("snapshot_failed", "log_low", "memory"), logging.ERROR),
    **dict.fromkeys(("log_full", "log_failed"), logging.CRITICAL),
}
# Anybody who reaches the server can come and go: a line for each would fill the disk. A whole host's workers fit in.
LINES_INTERVAL_S = 10.0
MAX_LINES = 128


class Server:
    """One server process; ``run`` is all of its lives.

    Args:
        settings: see ``ServerSettings``.
        until_stdin_closes: for an embedded server: end once standard input is at its end and no worker is a member
            any more, and leave SIGINT to the process that started this one. Workers that wait for a job's first values
            do not count: that process would have given them.

    Attributes:
        epoch: number of its life; grows from one to the next.
        addresses: of all shards, as clients reach them; [] before start-up.
        status_url: of the monitor; "" without one.
    """

    def __init__(self, settings: ServerSettings, *, until_stdin_closes: bool = False) -> None:
        self.settings = settings
        self.addresses: list[str] = []
        self.status_url = ""
        self._until_stdin_closes = until_stdin_closes
        self._reasons: SimpleQueue[str] = SimpleQueue()  # to end
        self._stopped_s: float | None = None  # when the first signal came
        self._interrupted_code = 0
        self._events = EventLog()
        self._started_s = time.monotonic()
        self._bound = settings.bind_addresses()
        self._begin_life()

    def _begin_life(self) -> None:
        # Microseconds since 1970, and then chance: what keeps nothing has no other order of its lives.
        self.epoch = (time.time_ns() // 1000) << 10 | secrets.randbits(10)
        self._shards = ShardGroup(self.settings, self._events.note)
        self._durability: Durability | None = None
        self._replication: Replication | None = None
        self._is_draining = False
        self._ended_s: dict[str, float] = {}  # by name, since when a job is seen without workers
        self._is_over = ""  # why this life ends, and another begins
        self._order_threads = ThreadPoolExecutor(MAX_ORDERS_AT_ONCE, thread_name_prefix="psengine-admin")

    def run(self, announce: Callable[[str], None] | None = None) -> int:
        """Serve until a signal; the process's exit code.

        Args:
            announce: takes the lines of start-up, of which the last is ``psengine-server ready ADDRESS ...``; by
                default they are logged.
        """
        try:
            with ExitStack() as process:
                self._handle_signals(process)
                while (code := self._live(process, announce or log_start)) is None:
                    announce = log_start
                    self._events.note("anew", f"this server begins anew: {self._is_over}")
                    self._begin_life()
                return code or self._interrupted_code
        except Exception as error:
            code = next((code for kind, code in _EXIT_CODES.items() if isinstance(error, kind)), EXIT_INTERNAL)
            logger.critical("psengine-server ends: %s", error, exc_info=code == EXIT_INTERNAL)
            return code

    def _live(self, process: ExitStack, announce: Callable[[str], None]) -> int | None:
        """One life; the process's exit code, or None where another life follows."""
        with ExitStack() as stack:
            self._start(process, stack, announce)
            is_good = self._serve()
            if self._is_over:
                return None
            return self._stop() if is_good else EXIT_INTERNAL

    def end(self, reason: str) -> None:
        """Ask the server to end in order, as SIGTERM does; ``run`` then returns. Callable from any thread."""
        self._reasons.put(reason)

    # ---- start-up ----------------------------------------------------------------------------------------------

    def _start(self, process: ExitStack, stack: ExitStack, announce: Callable[[str], None]) -> None:
        settings = self.settings
        torch.set_num_threads(1)
        keep_freed_memory()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, MAX_DESCRIPTORS)), hard))
        _import_plugins(settings.plugins or ())
        stack.enter_context(self._shards)
        shards = self._make_shards()
        durability, durable, known, previous = None, "not durable, no --snapshot-dir", {}, 0
        if settings.snapshot_dir is not None:
            durability = Durability(settings, stack, self._events.note)
            durable = durability.restore(shards, self.epoch)
            self.epoch, known, previous = durability.epoch, durability.known, durability.previous
        self._shards.open(self._bound)
        self._bound = [endpoint.address for endpoint in self._shards.endpoints]
        self.addresses = self._shards.addresses(socket.gethostname())
        pair = self._make_pair(durability, previous) if settings.has_replica else None
        for shard, endpoint in zip(shards, self._shards.endpoints, strict=True):
            facts = self.facts if shard.index == 0 else None
            given = self._shards.addresses("*"), self._on_admin
            thread = ShardThread(shard, endpoint, *given, facts=facts, pair=pair)
            thread.known = known if shard.index == 0 else {}
            if self._replication is not None:
                thread.on_kept = self._replication.wake
            self._shards.threads.append(thread)
        stack.callback(self._end_threads)
        if pair is None:
            self._lead(self.epoch, time.monotonic())
            if durability is not None:
                self._begin_durability(durability, self.epoch, False)
        for thread in self._shards.threads:
            thread.start()
        if self._replication is not None:
            self._replication.start()
        if settings.status_port is not None and not self.status_url:
            port = process.enter_context(self._open_status_port(settings.status_port))
            self.status_url = port.url
        self._events.note("started", f"psengine-server at {' '.join(self.addresses)} (process {os.getpid()})")
        self._announce_start(announce, durable)

    def _handle_signals(self, stack: ExitStack) -> None:
        """Take SIGTERM and SIGINT; an embedded server leaves SIGINT to the process that started it."""
        interrupt = signal.SIG_IGN if self._until_stdin_closes else self._on_signal
        if threading.current_thread() is threading.main_thread():
            for number, handler in ((signal.SIGTERM, self._on_signal), (signal.SIGINT, interrupt)):
                stack.callback(signal.signal, number, signal.signal(number, handler))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        now_s = time.monotonic()
        if self._stopped_s is not None:
            if now_s - self._stopped_s >= SAME_STOP_S:
                lost = _LOST.get(self.settings.tier, "nothing that was acknowledged")
                # Not through logging, which may hold a lock here.
                os.write(2, f"psengine-server: second signal, ending at once; {lost} is lost\n".encode())
                os._exit(128 + number)
            return
        self._stopped_s = now_s
        if number == signal.SIGINT:
            self._interrupted_code = 128 + number
        self.end(signal.Signals(number).name)

    def _make_shards(self) -> list[Shard]:
        settings = self.settings
        total_bytes = int(settings.max_memory_bytes or 0.8 * machine_memory_bytes())
        self._shard_settings = given = ShardSettings(
            lease_s=settings.lease_s,
            heartbeat_s=settings.lease_s / 5,
            max_memory_bytes=max(1, total_bytes // settings.shards),
            durability=settings.tier,
            keeps_updates="log" in settings.tier,
            likeness={
                "durability": settings.tier,
                "max_memory_bytes": total_bytes,
                "keep_history": settings.keep_history,
                "plugins": list(settings.plugins or ()),
            },
            keeps_snapshots=settings.snapshot_dir is not None,
            warns_of_loss=settings.tier == "memory" and not self._until_stdin_closes,
        )
        return [
            Shard(index, self.epoch, given, self._events.note, partial(self._shards.is_connected, index))
            for index in range(settings.shards)
        ]

    def _lead(self, epoch: int, now_s: float) -> None:
        """The shards go on with what is here; the first one last, which tells workers of the others."""
        self.epoch = epoch
        pair = None if self._replication is None else self._replication.pair
        # A snapshot of a replica alone lacks what was acknowledged after it.
        has_all = pair is not None and (pair.has_copy or not any(one.shard.jobs for one in self._shards.threads))
        keeps_updates = "log" in self.settings.tier or has_all
        self._shard_settings = replace(self._shard_settings, keeps_updates=keeps_updates)
        interfaces = Interfaces(
            epoch,
            self._shard_settings,
            time.time,
            self._events.note,
            draw_key=partial(secrets.token_bytes, KEY_BYTES),
            is_connected=partial(self._shards.is_connected, 0),
            is_gone=has_exited,
            # The workers of an embedded server are those of who started it: all of them are known.
            started_s=-math.inf if self._until_stdin_closes else now_s,
        )
        for thread in reversed(self._shards.threads):
            coordinators = None if thread.shard.index else Coordinators(interfaces)
            thread.shard.settings = self._shard_settings
            thread.ask(partial(thread.lead, epoch, now_s, coordinators))
        if pair is not None:
            self._events.note("leads", f"this server leads, under term {pair.succession.term}")

    def _make_pair(self, durability: Durability | None, previous: int) -> Pair:
        settings = self.settings
        guard = self._shards.authenticator
        self._replication = replication = Replication(
            make_elector(settings), lambda way: None if guard is None else guard.keys_for(way), settings.lease_s
        )
        replication.pair = Pair(
            Succession(
                Member(self.epoch, tuple(self.addresses), previous),
                lease_s=settings.lease_s,
                follow=settings.follow or "",
                was_paired=durability is not None and durability.was_paired,
            ),
            replication,
            self._shards.threads,
            lease_s=settings.lease_s,
            prepare=partial(self._prepare, durability),
            lead=self._lead,
            begin_anew=self._begin_anew,
            note=self._events.note,
        )
        self._prepared: Future[None] | None = None
        return replication.pair

    def _prepare(self, durability: Durability | None, epoch: int, is_copy: bool) -> bool:
        """What is here gets its log and snapshots, in a thread; whether it has them.

        Raises:
            SnapshotError: they could not be written.
        """
        if durability is None:
            return True
        if self._prepared is None:
            self._prepared = self._order_threads.submit(self._begin_durability, durability, epoch, is_copy)
        return self._prepared.done() and self._prepared.result() is None

    def _begin_durability(self, durability: Durability, epoch: int, is_copy: bool) -> None:
        durability.begin(self._shards.threads, epoch, is_copy=is_copy)
        self._durability = durability
        for thread in self._shards.threads if not durability.logs else ():
            thread.snapshot = durability.snapshot

    def _begin_anew(self, why: str) -> None:
        """Have this life end, and another begin."""
        if not self._is_over:
            self._is_over = why
            self._reasons.put(why)

    def _open_status_port(self, port: int) -> HttpStatus:
        try:
            return HttpStatus(
                port, server_pages(self.status, lambda: self._shards.is_healthy()), host=self.settings.status_bind
            )
        except OSError as error:
            raise BindError(
                f"The status port {self.settings.status_bind}:{port} could not be bound (expected a free port of an"
                f" address of this machine, got: {error.strerror}). Fix: choose another with --status-port, or 0; or"
                " another --status-bind."
            ) from error

    def _announce_start(self, announce: Callable[[str], None], durable: str) -> None:
        announce(f"durability {self.settings.tier}: {durable}")
        if self._shards.authenticator is not None:
            announce(self._shards.authenticator.describe())
        if self.status_url:
            announce(f"status at {self.status_url}")
        announce(f"psengine-server ready {' '.join(self.addresses)}")
        notify_manager("READY=1")

    # ---- main loop ---------------------------------------------------------------------------------------------

    def _serve(self) -> bool:
        """Serve until a request to end, or the end of an embedded server's purpose (True); or a failure (False)."""
        next_look_s, at_start_bytes = time.monotonic(), resident_bytes()
        while True:
            with suppress(Empty):
                reason = self._reasons.get(timeout=LOOP_S)
                if not self._is_over:
                    logger.info("shutting down: %s", reason)
                return True
            if self._replication is not None and self._replication.failure is not None:
                raise self._replication.failure
            if not self._shards.are_alive:
                return False
            if self._is_draining and self._shards.worker_count(remembers=True) == 0:
                self.end("drained, no worker is left")
            if self._until_stdin_closes and _has_ended(0) and self._shards.worker_count() == 0:
                self.end("standard input is at its end and no worker is left")
            if (now_s := time.monotonic()) >= next_look_s:
                next_look_s = now_s + LOOK_S
                if self._shards.is_healthy():
                    notify_manager("WATCHDOG=1")
                self._guard_memory(resident_bytes() - at_start_bytes - UNACCOUNTED_BYTES)
                if self.settings.keep_ended_jobs is not None:
                    with suppress(FutureTimeoutError, ShardEndedError, ProtocolError):
                        self._forget_ended(self.settings.keep_ended_jobs, now_s)

    def _guard_memory(self, unexplained_bytes: int) -> None:
        """Close connections whose messages fill the memory and do not end: credits do not bound those.

        Args:
            unexplained_bytes: how much is filled, beyond what a process needs.
        """
        if unexplained_bytes <= 0:
            return
        with suppress(FutureTimeoutError, ShardEndedError):
            known = self._shards.ask(lambda thread: thread.shard.memory_bytes() + thread.endpoint.unread_bytes)
            known_bytes = sum(known) + UNREAD_BYTES * self._shards.worker_count(remembers=True)
            # Snapshots copy what the shards know of; optimizers and averages need scratch space.
            if unexplained_bytes <= known_bytes * 5 // 2:
                return
            closed = sum(self._shards.ask(lambda thread: thread.endpoint.peers.close_unfinished(UNREAD_BYTES)))
            if closed:
                text = f"messages that do not end filled the memory: {closed} connections were closed; they come back"
                self._events.note("memory", text)

    def _forget_ended(self, kept: str, now_s: float) -> None:
        """Forget the jobs that have been without workers for too long, or the oldest of too many."""
        if self._replication is not None and not self._replication.pair.is_leading:
            return
        here = [item for jobs in self._shards.ask(lambda thread: thread.jobs_in_use()) for item in jobs.items()]
        used = {name for name, is_used in here if is_used}
        # In the order of their ends.
        ended = {name: since_s for name, since_s in self._ended_s.items() if name in dict(here) and name not in used}
        self._ended_s = ended | {name: now_s for name, _ in here if name not in used and name not in ended}
        names, number = list(self._ended_s), int(kept.rstrip("d"))
        if kept.endswith("d"):
            over = [name for name in names if now_s - self._ended_s[name] > number * 86400]
        else:
            over = names[: max(0, len(names) - number)]
        for name in over:
            self._forget(name)
            self._events.note("forgotten", f"it had no workers any more (--keep-ended-jobs {kept})", job=name)

    def facts(self) -> ServerFacts:
        """The process as it is now. Callable from any thread."""
        return ServerFacts(
            host=socket.gethostname(),
            unix_s=round(time.time(), 3),
            software=__version__,
            pid=os.getpid(),
            epoch=self.epoch,
            uptime_s=round(time.monotonic() - self._started_s, 3),
            healthy=self._shards.is_healthy(),
            addresses=tuple(self.addresses),
            refused_connections=0 if self._shards.authenticator is None else self._shards.authenticator.refused,
            connection_limit=self._shards.doorkeeper.limit,
            keep_ended_jobs=self.settings.keep_ended_jobs or "all",
            durability=self.settings.tier,
            snapshot=None if self._durability is None else self._durability.snapshot_status(),
            logs=() if self._durability is None else self._durability.log_status(),
            events=self._events.events(),
            is_draining=self._is_draining,
            replica=None if self._replication is None else self._replication.pair.status(self.settings.election or ""),
        )

    def status(self) -> ServerStatus:
        """The process and its shards as they are now; asks the shards' threads. Callable from any thread."""
        shards = self._shards.status()
        jobs = merge_jobs(shard for shard in shards if not shard.error)
        return ServerStatus(**vars(self.facts()), shards=shards, jobs=jobs)

    # ---- orders ------------------------------------------------------------------------------------------------

    def _on_admin(self, thread: ShardThread, route: bytes, request: Message, operator: str) -> None:
        """ADMIN arrived at a shard, from an operator."""
        logger.warning("ordered by %s: %s", operator, request.body)
        self._order_threads.submit(self._obey, thread, route, request)

    def _obey(self, thread: ShardThread, route: bytes, request: Message) -> None:
        action = request.body["action"]
        try:
            given = {name: value for name, value in request.body.items() if name != "action"}
            if action in ("evict", "forget", "drain") and self._replication is not None:
                self._replication.pair.check_leads()
            needed = {"evict": ["job", "worker"], "forget": ["job"]}.get(action, [])
            if sorted(given) != needed:
                wanted, got = (", ".join(names) or "none" for names in (needed, sorted(given)))
                raise ProtocolError(f"{action} has other parameters (expected {wanted}, got {got})")
            body: dict[str, Any] = {"text": getattr(self, f"_{action}")(**given)}
        except ProtocolError as error:
            body = {"text": str(error), "code": error.code}
        except FutureTimeoutError:
            text = "a shard is busy, and does as it was told as soon as it can. Fix: ask again until it is done"
            body = {"text": text, "code": ErrorCode.NOT_READY}
        except Exception as error:
            logger.exception("an order failed: %s", request.body)
            body = {"text": f"the server failed on this order: {error!r}", "code": ErrorCode.INTERNAL}
        thread.answer(route, request, body)
        if action == "shutdown" and "code" not in body:
            self.end("psengine admin shutdown")

    def _shutdown(self) -> str:
        return "The server shuts down: it answers what is queued, and writes a snapshot if it keeps any."

    def _snapshot(self) -> str:
        if self._durability is None:
            text = "this server keeps no snapshots (expected a --snapshot-dir)"
            raise ProtocolError(text, ErrorCode.SNAPSHOT_FAILED)
        try:
            generation = self._durability.snapshot().result(ORDERED_SNAPSHOT_S)
        except FutureTimeoutError:
            return f"The snapshot is being written; it takes longer than {ORDERED_SNAPSHOT_S:g} s."
        except SnapshotError as error:
            raise ProtocolError(f"no snapshot was written: {error}", ErrorCode.SNAPSHOT_FAILED) from error
        return f"Durable to generation {generation}."

    def _evict(self, job: str, worker: int) -> str:
        if not any(self._shards.ask(lambda thread: thread.evict(job, worker))):
            text = f"job {job!r} has no worker {worker}, or another server leads it (the first of the job's list)"
            raise ProtocolError(text, ErrorCode.UNKNOWN_JOB)
        return f"Worker {worker} is out. If its process lives, it says HELLO again and comes back."

    def _forget(self, job: str) -> str:
        workers = self._shards.ask(lambda thread: thread.forget_led(job))[0]
        if workers:
            raise ProtocolError(
                f"job {job!r} is in use (expected no workers, got {workers}). Fix: end them, or their leases (psengine"
                " admin evict); a worker that died counts until its lease is over",
                ErrorCode.NOT_READY,
            )
        was_known = self._shards.ask(lambda thread: thread.shard.drop(job_number(job)))
        if workers is None and not any(was_known):
            raise ProtocolError(f"there is no job {job!r}", ErrorCode.UNKNOWN_JOB)
        if self._durability is not None:
            self._durability.snapshot()  # a crash before the next interval would restore the job
        return f"Job {job!r} is forgotten: its values, and its place among the server's jobs."

    def _drain(self) -> str:
        """Let no more workers in; the main loop ends the server when the last has left."""
        if not self._is_draining:
            self._is_draining = True  # before the shards are asked: a busy one lets nobody in as soon as it can
            self._events.note("draining", "no more workers are let in; the server ends when the last one has left")
        count = self._shards.ask(lambda one: 0 if one.coordinators is None else one.coordinators.close())[0]
        end = f"It ends when the last of {count} has left." if count else "There is none: it ends now."
        return f"The server lets no more workers in. {end}"

    # ---- shutdown ----------------------------------------------------------------------------------------------

    def _stop(self) -> int:
        notify_manager("STOPPING=1")
        for index in self._shards.drain():
            logger.warning("shard %d did not answer all that was queued", index)
        pair = None if self._replication is None else self._replication.pair
        is_followed = pair is not None and pair.is_leading and pair.status("").is_in_sync
        if self._durability is None or is_followed:
            return 0  # a follower has all, and leads once the lease is given back: no snapshot keeps workers waiting
        written = self._durability.snapshot()
        last_s = time.monotonic() + LAST_SNAPSHOT_S
        while not wait([written], 2.0).done:
            if time.monotonic() > last_s:
                logger.critical("the last snapshot was not written within %g s", LAST_SNAPSHOT_S)
                return EXIT_SNAPSHOT
            notify_manager("EXTEND_TIMEOUT_USEC=10000000")
        if not self._shards.are_alive:
            return EXIT_INTERNAL
        written.result()
        return 0

    def _end_threads(self) -> None:
        if self._replication is not None:
            self._replication.end()
            wait([] if self._prepared is None else [self._prepared], LAST_SNAPSHOT_S)
        self._order_threads.shutdown(wait=False, cancel_futures=True)
        if self._durability is not None:
            self._durability.end()
        self._shards.end()
        if self._durability is not None:
            self._durability.end_logs()


def log_start(line: str) -> None:
    """Log a line of start-up."""
    logger.info("%s", line)


def notify_manager(state: str) -> None:
    """Tell the service manager by its socket (``sd_notify(3)``), such as ``notify_manager("READY=1")``.

    Does nothing without NOTIFY_SOCKET, and only logs where it fails.
    """
    address = read_variable("NOTIFY_SOCKET")
    if not address or address[0] not in "/@":
        return
    # An abstract socket's name begins with a zero byte, which the variable spells "@".
    target = "\0" + address[1:] if address[0] == "@" else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.settimeout(1.0)
            sender.connect(target)
            sender.sendall(state.encode())
    except OSError as error:
        logger.warning("the service manager at NOTIFY_SOCKET=%s was not told %s: %s", address, state, error)


def _import_plugins(names: Iterable[str]) -> None:
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise ConfigurationError(
                f"plugins names modules that the server can import (expected one called {name!r}, got {error}). Fix:"
                " put its directory into PYTHONPATH."
            ) from error


def _has_ended(descriptor: int) -> bool:
    """Whether a pipe, of which nobody reads anything else, has no writer any more."""
    return bool(select.select([descriptor], [], [], 0.0)[0]) and not os.read(descriptor, 4096)


class ShardGroup:
    """All shards of a server, what is asked of all, and what is ordered to all. Callable from any thread.

    Has sockets between ``__enter__`` and ``__exit__``, and threads after ``start``.

    Args:
        settings: see ``ServerSettings``.
        note: see ``EventLog.note``.

    Attributes:
        authenticator: decides who may connect; None where anybody may.
        doorkeeper: bounds the connections.
        endpoints: in the order of shards; [] before ``open``. A shard's thread closes its own.
        threads: likewise; [] before ``start``.
    """

    def __init__(self, settings: ServerSettings, note: Callable[..., None]) -> None:
        self._settings, self._note = settings, note
        self.authenticator: Authenticator | None = None
        self.endpoints: list[Endpoint] = []
        self.threads: list[ShardThread] = []

    def __enter__(self) -> ShardGroup:
        settings, self.doorkeeper = self._settings, Doorkeeper(self._note)
        # A thread serves one TCP stream at full speed, a third of one with CURVE. Two were no faster on two cores.
        self._context: zmq.Context[Any] = zmq.Context(max(1, min(settings.shards, (os.cpu_count() or 1) // 2)))
        if settings.insecure:
            logger.warning(
                "INSECURE: %s takes anybody who reaches it%s, without keys and in the clear; whoever does can read and"
                " overwrite every model here. Use psengine-server keygen, --curve-key and --allow, or --secret-file.",
                settings.bind,
                ", every user of this machine" if settings.is_local else "",
            )
        else:
            self.authenticator = Authenticator(self._context, settings)
        return self

    def __exit__(self, *exception: object) -> None:
        if not self.threads:
            for endpoint in self.endpoints:
                endpoint.close(0)
        self.doorkeeper.end()
        if self.authenticator is not None:
            self.authenticator.end()
        if any(thread.is_alive() for thread in self.threads):
            logger.error("a shard is still busy; the process ends without it")  # its socket is its own
        else:
            self._context.destroy(linger=LINGER_MS)

    # ---- addresses ---------------------------------------------------------------------------------------------

    def open(self, addresses: Iterable[str]) -> None:
        """Bind these addresses, one for each shard.

        Raises:
            ConfigurationError, BindError: an address cannot be bound.
        """
        for address in addresses:
            endpoint = Endpoint(
                self._context,
                address,
                self.authenticator,
                lease_s=self._settings.lease_s,
                backlog=max(1, min(1024, self.doorkeeper.limit // 8)),
            )
            self.endpoints.append(endpoint)
            self.doorkeeper.watch(endpoint.peers)
            # This user's clients on this host look here first; others use TCP, also where /tmp is read-only.
            may_fail = () if is_loopback(endpoint.address) else (ConfigurationError, BindError)
            with suppress(*may_fail):
                if endpoint.address.startswith("tcp://"):
                    remove_stale_sockets()
                    endpoint.open_local(socket_beside(endpoint.address, make=True))
        self.doorkeeper.start()
        if self.authenticator is not None:
            # After all binds: a client that TCP refuses looks for the Unix socket once more, and then gives up.
            self.authenticator.start()

    def addresses(self, host: str) -> list[str]:
        """The shards' addresses, with ``host`` for a wildcard; clients replace "*" by the host they connected to."""
        if not self._settings.is_wildcard:
            return [endpoint.address for endpoint in self.endpoints]
        return [f"tcp://{host}:{endpoint.address.rpartition(':')[2]}" for endpoint in self.endpoints]

    def is_connected(self, index: int, route: bytes) -> bool:
        """Whether a connection of this shard stands; in its thread."""
        return self.endpoints[index].peers.is_connected(route)

    # ---- questions ---------------------------------------------------------------------------------------------

    def ask(self, function: Callable[[ShardThread], _Result]) -> list[_Result]:
        """Call ``function`` with every shard's thread, in that thread; the results.

        Raises:
            concurrent.futures.TimeoutError: a shard did not answer; it does what it was asked as soon as it can.
            ShardEndedError: a shard's thread has ended.
        """
        futures = [thread.ask(partial(function, thread)) for thread in self.threads]
        wait(futures, ANSWER_DEADLINE_S)
        return [future.result(0) for future in futures]

    def status(self) -> tuple[ShardStatus, ...]:
        """Each shard's status, or why there is none."""
        futures = [thread.ask(thread.status) for thread in self.threads]
        wait(futures, ANSWER_DEADLINE_S)
        found = []
        for index, future in enumerate(futures):
            try:
                found.append(future.result(0))
            except (FutureTimeoutError, ShardEndedError) as error:
                future.cancel()
                found.append(ShardStatus(index=index, error=str(error) or f"no answer within {ANSWER_DEADLINE_S:g} s"))
        return tuple(found)

    @property
    def are_alive(self) -> bool:
        """Whether every thread lives, also the authenticator's."""
        guard_lives = self.authenticator is None or self.authenticator.is_alive()
        return guard_lives and self.doorkeeper.is_alive() and all(thread.is_alive() for thread in self.threads)

    def is_healthy(self) -> bool:
        """Whether every thread lives and ticks."""
        now_s = time.monotonic()
        return self.are_alive and all(now_s - thread.last_tick_s < HEALTHY_S for thread in self.threads)

    def worker_count(self, *, remembers: bool = False) -> int:
        """Workers: that this server leads, or that are connected to a shard; 1 where a shard does not answer.

        Args:
            remembers: count those too that were put out less than a lease ago, or wait for a job's first values.
        """

        def count(thread: ShardThread) -> int:
            here, led = thread.shard.members_connected(), thread.coordinators
            return here if led is None else max(here, led.remembered_count() if remembers else led.training_count())

        try:
            return max(self.ask(count))
        except (FutureTimeoutError, ShardEndedError):
            return 1

    # ---- the end -----------------------------------------------------------------------------------------------

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
            if thread.is_alive():  # where the start fails none has begun
                thread.join(timeout=2.0)
        self.doorkeeper.end()  # until then zmq waits for it with each connection


class EventLog:
    """What happened to a server, its jobs and workers, for people: the last ``MAX_EVENTS``; thread-safe.

    It writes lines to the server's log, too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines = RateLimit(LINES_INTERVAL_S, MAX_LINES)
        # By where they come from, in the order of their times: the last event, and how many there were.
        self._events: dict[object, tuple[Event, int]] = {}

    def note(self, kind: str, text: str, *, job: str = "", worker: int | None = None) -> None:
        """Something happened; the arguments are those of ``Event``."""
        source = (kind, job, worker) if kind in _MERGED else object()
        with self._lock:
            _, count = self._events.pop(source, (None, 0))
            if count and kind != "snapshot":
                text = f"{text}; {count} like it before"
            self._events[source] = Event(round(time.time(), 3), kind, job, worker, text), count + 1
            if len(self._events) > MAX_EVENTS:
                del self._events[next(iter(self._events))]
            if (level := _LOGGED.get(kind)) is None:
                return
            left_out = 0 if level > logging.WARNING else self._lines.allows(time.monotonic())
            if left_out is not None:
                more = f" ({left_out} lines were left out before)" if left_out else ""
                logger.log(level, "%s%s%s", f"job {job!r}: " if job else "", text, more)

    def events(self) -> tuple[Event, ...]:
        """The newest last."""
        with self._lock:
            return tuple(event for event, _ in self._events.values())
