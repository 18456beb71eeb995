"""A server process: start-up, main loop, shutdown.

    main thread      signals, watchdog, health ──────────────────────────────────────────┐
    shard threads    one each: socket ► shard ► socket                                   ├─ nothing shared but queues
    snapshot thread  asks the shards for copies, writes a generation                     │
    authenticator    who may connect                     monitor    HTTP for people ─────┘

The first SIGTERM or SIGINT ends it in order: what is queued is answered, newcomers are refused, a snapshot is written.
The second ends it at once, which costs what came after the last snapshot and harms none that was written.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, TypeVar

import torch
import zmq

from psengine.environment.local_sockets import is_loopback, remove_stale_sockets, socket_beside
from psengine.errors import AuthenticationError, ConfigurationError, SnapshotError
from psengine.kernels.freed_memory import keep_freed_memory
from psengine.parameter_server.overview import merge_jobs
from psengine.parameter_server.server import systemd
from psengine.parameter_server.server.core.clocks import Clocks
from psengine.parameter_server.server.core.events import EventLog
from psengine.parameter_server.server.core.shard import Outgoing, Shard, ShardSettings
from psengine.parameter_server.server.durability.snapshot_thread import (
    Restored,
    SnapshotOutcome,
    SnapshotThread,
    restore,
)
from psengine.parameter_server.server.settings import ServerSettings
from psengine.parameter_server.server.snapshots.store import SnapshotStore
from psengine.parameter_server.server.status.actions import ActionHandlers, Actions
from psengine.parameter_server.server.status.history import History
from psengine.parameter_server.server.status.monitor import Monitor, Pages
from psengine.parameter_server.server.transport.authentication import Authenticator
from psengine.parameter_server.server.transport.connections import Connections, raise_descriptor_limit
from psengine.parameter_server.server.transport.endpoint import LINGER_MS, BindError, Endpoint
from psengine.parameter_server.server.transport.key_rings import AllowedKeys, KeyRing, SecretKeys
from psengine.parameter_server.server.transport.memory_guard import ACCOUNTED_FACTOR, MemoryGuard, machine_memory_bytes
from psengine.parameter_server.server.transport.shard_thread import (
    LAST_MESSAGES_S,
    ShardEndedError,
    ShardThread,
    answer,
    error_answer,
)
from psengine.parameter_server.status_model import MuteShard, ServerStatus, ShardStatus
from psengine.protocol.keys import read_token
from psengine.protocol.messages import ErrorCode, Message, MessageType
from psengine.version import __version__

logger = logging.getLogger(__name__)

EXIT_OK = 0
EXIT_CONFIGURATION = 2
EXIT_BIND = 3
EXIT_SNAPSHOT = 4
EXIT_INTERNAL = 5
_EXIT_CODES: tuple[tuple[type[Exception], int], ...] = (
    (ConfigurationError, EXIT_CONFIGURATION),
    (AuthenticationError, EXIT_CONFIGURATION),
    (BindError, EXIT_BIND),
    (SnapshotError, EXIT_SNAPSHOT),
)

LOOP_S = 0.1
# A shard that does not tick for so long is not healthy; copying a large model for a snapshot takes a second.
HEALTHY_S = 10.0
STATUS_DEADLINE_S = 3.0
LAST_SNAPSHOT_S = 600.0
CONTEXT_DEADLINE_S = 5.0
_REPORT_S = 10.0
CLOCKS = Clocks(wall_s=time.time, measure_s=time.perf_counter)
_Answer = TypeVar("_Answer")


class Server:
    """One server process; ``run`` is its life.

    Args:
        settings: see ``ServerSettings``.
        until_stdin_closes: an embedded server's way to end: once standard input is at its end and no worker is a
            member any more; those that wait for a job's first values do not count, as the process that started this
            server would have given them. SIGINT is left to that process.

    Attributes:
        epoch: random number of this life.
        addresses: of all shards, as clients reach them; [] before start-up.
        status_url: of the monitor; "" without one.
    """

    def __init__(self, settings: ServerSettings, *, until_stdin_closes: bool = False) -> None:
        self.settings = settings
        self.epoch = secrets.randbits(63) or 1
        self.addresses: list[str] = []
        self.status_url = ""
        self._until_stdin_closes = until_stdin_closes
        self._stdin_closed = threading.Event()
        self._events: SimpleQueue[str | None] = SimpleQueue()
        self._event_log = EventLog(CLOCKS)
        self._snapshots_noted = (0, 0)
        self._signals = 0
        self._threads: list[ShardThread] = []
        self._dead: list[ShardThread] = []
        self._snapshots: SnapshotThread | None = None
        self._authenticator: Authenticator | None = None
        self._started_s = time.monotonic()

    def run(self, announce: Callable[[str], None] | None = None) -> int:
        """Serve until a signal; the process's exit code.

        Args:
            announce: takes the lines of start-up; the last one is ``psengine-server ready ADDRESS ...``. Without it
                they are logged.
        """
        try:
            with ExitStack() as stack:
                stack.enter_context(self._handle_signals())
                self._start(stack, announce or log_start)
                is_good = self._serve()
                return self._stop() if is_good else EXIT_INTERNAL
        except Exception as error:
            code = next((code for kind, code in _EXIT_CODES if isinstance(error, kind)), EXIT_INTERNAL)
            logger.critical("psengine-server ends: %s", error, exc_info=code == EXIT_INTERNAL)
            return code

    # ---- start-up ----------------------------------------------------------------------------------------------

    def _start(self, stack: ExitStack, announce: Callable[[str], None]) -> None:
        settings = self.settings
        torch.set_num_threads(1)
        keep_freed_memory()
        raise_descriptor_limit()
        self._connections = stack.enter_context(closing(Connections(self._is_ours)))
        if settings.insecure:
            logger.warning(
                "INSECURE: %s takes anybody who reaches it%s, without keys and in the clear; whoever does can read and"
                " overwrite every model here. Use psengine-server keygen, --curve-key and --allow, or --secret-file.",
                settings.bind,
                ", every user of this machine" if settings.is_local else "",
            )
        token = self._read_status_token()
        store = None
        if settings.snapshot_dir is not None:
            store = stack.enter_context(SnapshotStore(settings.snapshot_dir))
        # One serves about one TCP stream at full speed, a third of one with CURVE. On two cores two were no faster.
        io_threads = max(1, min(settings.shards, (os.cpu_count() or 1) // 2))
        context: zmq.Context[Any] = zmq.Context(io_threads)
        stack.callback(self._end_context, context)
        if not settings.insecure:
            self._authenticator = Authenticator(context, _key_ring(settings))
            stack.callback(self._authenticator.end)
        shard_settings = self._shard_settings()
        shards = [Shard(index, self.epoch, shard_settings, CLOCKS) for index in range(settings.shards)]
        for shard in shards:
            shard.events = self._event_log
        restored = Restored(None, "not durable: no --snapshot-dir", [])
        if store is not None:
            restored = restore(store, shards)
            for note in restored.notes:
                logger.warning("%s", note)
            if restored.notes:
                self._event_log.note("snapshot_failed", "; ".join(restored.notes))
        endpoints: list[Endpoint] = []
        for address in settings.bind_addresses():
            endpoints.append(Endpoint(context, address, self._authenticator))
            stack.callback(self._close_unless_used, endpoints[-1])
            self._open_local(endpoints[-1])
        if self._authenticator is not None:
            # Not before: who is refused at TCP looks for the Unix socket once more, and then gives up.
            self._authenticator.start()
            doors = [*(_reachable(e.address) for e in endpoints), *(e.local_address for e in endpoints)]
            self._authenticator.probe([door for door in doors if door])
        self.addresses = [self._known_as(endpoint.address, socket.gethostname()) for endpoint in endpoints]
        advertised = [self._known_as(endpoint.address, "*") for endpoint in endpoints]
        stack.callback(self._end_threads)
        for shard, endpoint in zip(shards, endpoints, strict=True):
            shard.shard_addresses = advertised
            endpoint.connections = self._connections
            self._threads.append(ShardThread(shard, endpoint, self._on_snapshot, self._on_death))
            self._threads[-1].start()
        if store is not None:
            interval_s = settings.snapshot_interval_s
            self._snapshots = SnapshotThread(store, self._threads, interval_s, restored.generation)
            self._snapshots_noted = (restored.generation or 0, 0)
            if restored.generation is not None:
                self._event_log.note("restored", f"taken over: {restored.summary}")
            self._snapshots.start()
        if settings.status_port is not None:
            history = stack.enter_context(History(self.status))
            monitor = stack.enter_context(self._monitor(settings.status_port, history, token))
            self.status_url = monitor.url
        if self._until_stdin_closes:
            threading.Thread(target=self._await_stdin, name="psengine-stdin", daemon=True).start()
        self._event_log.note("started", f"psengine-server at {' '.join(self.addresses)} (process {os.getpid()})")
        self._announce_start(announce, restored.summary)

    def _open_local(self, endpoint: Endpoint) -> None:
        """Listen beside loopback TCP too, where this user's clients look first; others use TCP.

        Raises:
            ConfigurationError, BindError: it cannot be opened, and is the only way in.
        """
        if not is_loopback(endpoint.address):
            return
        remove_stale_sockets()
        try:
            endpoint.open_local(socket_beside(endpoint.address, make=True))
        except (ConfigurationError, BindError) as error:
            if not (self.settings.insecure or self.settings.curve_key or self.settings.secret_file):
                raise
            logger.warning("clients on this machine use TCP, which is slower: %s", error)

    def _read_status_token(self) -> str:
        path = self.settings.status_token
        if path is None:
            return ""
        if self.settings.status_port is None:
            # Servers that a training starts inherit PSENGINE_STATUS_TOKEN, and only one of them may have the port.
            logger.info("the status token in %s is not used: there is no status port (--status-port)", path)
            return ""
        return read_token(path)

    def _shard_settings(self) -> ShardSettings:
        total_bytes = self.settings.max_memory_bytes or int(0.8 * machine_memory_bytes())
        return ShardSettings(
            lease_s=self.settings.lease_s,
            heartbeat_s=self.settings.heartbeat_s,
            max_memory_bytes=max(1, total_bytes // self.settings.shards),
            software=__version__,
        )

    def _known_as(self, address: str, host: str) -> str:
        """A wildcard's address under a host name; "*" tells clients to put in the host by which they came."""
        return f"tcp://{host}:{address.rpartition(':')[2]}" if self.settings.is_wildcard else address

    def _monitor(self, port: int, history: History, token: str) -> Monitor:
        handlers = ActionHandlers(
            snapshot=None if self._snapshots is None else self._snapshots.begin,
            evict=self._evict,
            forget=self._forget,
            shut_down=lambda: self._events.put("POST /actions/shutdown"),
        )
        try:
            return Monitor(port, Pages(self.status, self.is_healthy, history, Actions(token, handlers)))
        except OSError as error:
            raise BindError(
                f"The status port 127.0.0.1:{port} could not be bound (expected a free one, got: {error.strerror})."
                " Fix: choose another with --status-port, or 0."
            ) from error

    def _announce_start(self, announce: Callable[[str], None], durability: str) -> None:
        lines = [self._whereabouts(), durability]
        if self._authenticator is not None:
            lines.append(self._authenticator.describe())
        if self.status_url:
            lines.append(f"status at {self.status_url}")
        lines.append(f"psengine-server ready {' '.join(self.addresses)}")
        for line in lines:
            announce(line)
        systemd.notify("READY=1", f"STATUS={lines[0]}; {durability}")

    # ---- main loop ---------------------------------------------------------------------------------------------

    def _serve(self) -> bool:
        """Until a signal or the end of an embedded server's purpose (True), or a failure (False)."""
        watchdog_s = systemd.watchdog_interval_s()
        next_beat_s = next_report_s = time.monotonic()
        guard = MemoryGuard(min(1 << 30, self.settings.max_memory_bytes or 1 << 30), self._expected_bytes)
        while True:
            try:
                reason = self._events.get(timeout=LOOP_S)
                if reason is not None:
                    logger.info("shutting down: %s", reason)
                    return True
            except Empty:
                pass
            if self._dead or not all(thread.is_alive() for thread in self._threads):
                return False
            if self._authenticator is not None and not self._authenticator.is_alive():
                return False
            self._note_snapshots()
            self._connections.keep_bounded()
            excess_bytes = guard.excess_bytes()
            if excess_bytes:
                self._free_memory(excess_bytes)
            now_s = time.monotonic()
            if watchdog_s is not None and now_s >= next_beat_s and self.is_healthy():
                systemd.notify("WATCHDOG=1")
                next_beat_s = now_s + watchdog_s
            if now_s >= next_report_s:
                systemd.notify(f"STATUS={self._summary()}")
                next_report_s = now_s + _REPORT_S
            if self._stdin_closed.is_set() and self._training_count() == 0:
                logger.info("shutting down: standard input is at its end and no worker is left")
                return True

    def _free_memory(self, excess_bytes: int) -> None:
        """Cut the connections that fill the memory; all where it is not known which they are."""
        whose = self._connections.cut_largest(excess_bytes)
        if not whose:
            for thread in self._threads:
                thread.ask(thread.endpoint.reset)
        text = (
            f"{excess_bytes >> 20} MiB of memory are filled by messages that do not end or answers that nobody reads:"
            f" {'the connections of ' + ', '.join(whose[:5]) if whose else 'all connections'} were cut"
        )
        logger.error("%s; clients come back", text)
        self._event_log.note("memory", text)

    def _is_ours(self, socket_name: Any) -> bool:
        """Whether a socket with this name of its own belongs to a connection that a shard has accepted."""
        if isinstance(socket_name, tuple):
            ports = {e.endpoint.address.rpartition(":")[2] for e in self._threads}
            return str(socket_name[1]) in ports
        name = os.fsdecode(socket_name)
        addresses = {a for e in self._threads for a in (e.endpoint.address, e.endpoint.local_address)}
        return f"ipc://{name.replace(chr(0), '@', 1)}" in addresses

    def _note_snapshots(self) -> None:
        """Tell people of snapshots since the last call."""
        if self._snapshots is None:
            return
        # None, or an older one, once somebody has removed the newest.
        generation, failures = self._snapshots.generation or 0, self._snapshots.failures
        noted_generation, noted_failures = self._snapshots_noted
        self._snapshots_noted = (max(generation, noted_generation), failures)
        if generation > noted_generation:
            self._event_log.note("snapshot", f"generation {generation} is written")
        if failures != noted_failures:
            self._event_log.note("snapshot_failed", f"a snapshot was not written: {self._snapshots.last_error}")

    def _summary(self) -> str:
        if self._snapshots is None:
            durable = "not durable"
        elif self._snapshots.generation is None:
            durable = "durable to no generation yet"
        else:
            durable = f"durable to generation {self._snapshots.generation}"
        return f"{self._whereabouts()}; {durable}"

    def _whereabouts(self) -> str:
        count = len(self.addresses)
        return f"{count} {'shard' if count == 1 else 'shards'} at {' '.join(self.addresses)}"

    def _training_count(self) -> int:
        """Workers at the shard that has most of them; 1 where a shard does not say."""
        try:
            return max(self._ask_all(lambda shard: shard.training_count))
        except (FutureTimeoutError, ShardEndedError):
            return 1

    def _expected_bytes(self) -> int:
        """What the shards hold, with the copies a snapshot takes, and what their workers may have under way."""

        def expected(shard: Shard) -> int:
            return int(ACCOUNTED_FACTOR * shard.memory_bytes()) + shard.member_count * shard.settings.credit_bytes

        try:
            return sum(self._ask_all(expected))
        except (FutureTimeoutError, ShardEndedError):
            return machine_memory_bytes()  # no verdict now

    def _ask_all(self, function: Callable[[Shard], _Answer]) -> list[_Answer]:
        """``function`` of every shard, called in its thread.

        Raises:
            concurrent.futures.TimeoutError: one did not answer.
        """
        return _answers([thread.ask(partial(function, thread.shard)) for thread in self._threads])

    def _evict(self, job: str, rank: int) -> bool:
        """End a worker's lease at every shard; whether any knew the worker.

        Raises:
            concurrent.futures.TimeoutError: a shard is busy; it ends the lease as soon as it can.
        """
        return any(_answers([thread.ask(partial(thread.evict, job, rank)) for thread in self._threads]))

    def _forget(self, job: str) -> int | None:
        """Drop a job without workers at every shard, and from disk; how many workers keep it, None where none knows it.

        Raises:
            concurrent.futures.TimeoutError: a shard is busy.
        """
        counts = self._ask_all(lambda shard: shard.worker_count(job))
        known = [count for count in counts if count is not None]
        if not known or any(known):
            return max(known, default=None)
        forgotten = [thread.ask(partial(Shard.forget, thread.shard, job)) for thread in self._threads]
        if self._snapshots is not None:
            # A crash before the next interval would bring it back. Shards do what they are asked in order.
            self._snapshots.begin()
        _answers(forgotten)
        return 0

    def _on_snapshot(self, thread: ShardThread, route: bytes, message: Message) -> None:
        """SNAPSHOT arrived at a shard; its answer leaves once the snapshot is durable."""

        def done(outcome: SnapshotOutcome) -> None:
            reply = answer(message, self.epoch, MessageType.OK, {"generation": outcome.generation})
            if outcome.error:
                reply = error_answer(message, self.epoch, ErrorCode.SNAPSHOT_FAILED, outcome.error)
            thread.post(Outgoing(route, reply))

        if self._snapshots is None:
            done(SnapshotOutcome(None, "this server keeps no snapshots; start it with --snapshot-dir"))
        else:
            self._snapshots.request(done)

    def _on_death(self, thread: ShardThread) -> None:
        self._dead.append(thread)
        self._events.put(None)

    def is_healthy(self) -> bool:
        """Whether every thread lives and ticks."""
        now_s = time.monotonic()
        guarded = self._authenticator is None or self._authenticator.is_alive()
        return guarded and all(t.is_alive() and now_s - t.last_tick_s < HEALTHY_S for t in self._threads)

    def status(self) -> ServerStatus:
        """The server as it is now; asks the shards' threads. Callable from any thread."""
        futures = [(thread, thread.ask(thread.status)) for thread in self._threads]
        last_s = time.monotonic() + STATUS_DEADLINE_S
        shards: list[ShardStatus | MuteShard] = []
        for thread, future in futures:
            try:
                shards.append(future.result(max(0.0, last_s - time.monotonic())))
            except FutureTimeoutError:
                future.cancel()
                error = f"no answer within {STATUS_DEADLINE_S:g} s"
                shards.append(MuteShard(index=thread.shard.index, error=error))
            except ShardEndedError as error:
                shards.append(MuteShard(index=thread.shard.index, error=str(error)))
        return ServerStatus(
            host=socket.gethostname(),
            unix_s=round(time.time(), 3),
            software=__version__,
            pid=os.getpid(),
            epoch=self.epoch,
            uptime_s=round(time.monotonic() - self._started_s, 3),
            healthy=self.is_healthy(),
            addresses=tuple(self.addresses),
            refused_connections=0 if self._authenticator is None else self._authenticator.refused,
            snapshot=None if self._snapshots is None else self._snapshots.status(),
            shards=tuple(shards),
            jobs=merge_jobs(shard for shard in shards if isinstance(shard, ShardStatus)),
            events=self._event_log.events(),
            can_act=self.settings.status_token is not None,
            **self._connections.status(),
        )

    # ---- shutdown ----------------------------------------------------------------------------------------------

    def _stop(self) -> int:
        systemd.notify("STOPPING=1", "STATUS=shutting down")
        for thread in self._threads:
            thread.drain()
        for thread in self._threads:
            if not thread.drained.wait(LAST_MESSAGES_S + 1.0):
                logger.warning("shard %d did not answer all that was queued", thread.shard.index)
        if self._snapshots is None:
            return EXIT_OK
        written = self._snapshots.begin()
        last_s = time.monotonic() + LAST_SNAPSHOT_S
        while True:
            try:
                outcome = written.result(2.0)
                break
            except FutureTimeoutError:
                if time.monotonic() > last_s:
                    logger.critical("the last snapshot was not written within %g s", LAST_SNAPSHOT_S)
                    return EXIT_SNAPSHOT
                systemd.notify("EXTEND_TIMEOUT_USEC=10000000")
        if self._dead:
            return EXIT_INTERNAL
        return EXIT_SNAPSHOT if outcome.error and not outcome.is_empty else EXIT_OK

    def _end_threads(self) -> None:
        if self._snapshots is not None:
            self._snapshots.end()
            self._snapshots.join(timeout=5.0)
        for thread in self._threads:
            thread.end()
        for thread in self._threads:
            thread.join(timeout=2.0)

    def _close_unless_used(self, endpoint: Endpoint) -> None:
        if not self._threads:
            endpoint.close(0)

    def _end_context(self, context: zmq.Context[Any]) -> None:
        if any(thread.is_alive() for thread in self._threads):
            logger.error("a shard is busy still; the process ends without it")  # its socket is its own
            return
        # Sockets that nobody closed would keep it for ever.
        ending = threading.Thread(target=context.destroy, kwargs={"linger": LINGER_MS}, daemon=True)
        ending.start()
        ending.join(timeout=CONTEXT_DEADLINE_S)
        if ending.is_alive():
            logger.error("sockets were not closed within %g s; the process ends without them", CONTEXT_DEADLINE_S)

    @contextmanager
    def _handle_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        interrupt = signal.SIG_IGN if self._until_stdin_closes else self._on_signal
        previous = {
            signal.SIGTERM: signal.signal(signal.SIGTERM, self._on_signal),
            signal.SIGINT: signal.signal(signal.SIGINT, interrupt),
        }
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1
        if self._signals > 1:
            # Logging may hold a lock here.
            os.write(2, b"psengine-server: second signal, ending at once\n")
            os._exit(128 + number)
        self._events.put(signal.Signals(number).name)

    def _await_stdin(self) -> None:
        try:
            while os.read(0, 4096):
                pass
        except OSError as error:
            logger.warning("standard input cannot be read (%s): taken for closed", error)
        self._stdin_closed.set()


def _key_ring(settings: ServerSettings) -> KeyRing | None:
    if settings.curve_key is not None and settings.allow is not None:
        return AllowedKeys(settings.curve_key, settings.allow)
    return None if settings.secret_file is None else SecretKeys(settings.secret_file)


def log_start(line: str) -> None:
    """Log a line of start-up."""
    logger.info("%s", line)


def _answers(futures: Sequence[Future[_Answer]]) -> list[_Answer]:
    """What shards answer to what they were asked, within one deadline.

    Raises:
        concurrent.futures.TimeoutError: one did not answer; it does what it was asked as soon as it can.
    """
    last_s = time.monotonic() + STATUS_DEADLINE_S
    return [future.result(max(0.0, last_s - time.monotonic())) for future in futures]


def _reachable(address: str) -> str:
    """Where the process itself reaches an address that it bound."""
    return address.replace("tcp://0.0.0.0:", "tcp://127.0.0.1:").replace("tcp://[::]:", "tcp://[::1]:")
