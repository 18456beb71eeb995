"""A client's part in a job: who it is, its connections to the coordinator and the shards, and the view it holds.

    any thread       ask(channel, message) ── do ──►  the I/O thread: channel.begin
    the transport    received, connected, tick ─────► channels
    the coordinator  PREPARE ─► freeze ─ COMMIT       VIEW ─► adopt, forward to every shard, push again what is open

Pure: clock and sockets come with the ``Runtime``.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from psengine.errors import (
    ConfigurationError,
    FencedError,
    PSEngineError,
    ServerRefusedError,
)
from psengine.parameter_server.client.channel import Channel
from psengine.parameter_server.client.chunk_map import ChunkMap
from psengine.parameter_server.client.control import Control
from psengine.parameter_server.client.link import Link
from psengine.parameter_server.client.operation import Parking, Push, Request
from psengine.parameter_server.client.options import SessionOptions
from psengine.parameter_server.client.runtime import Runtime, Transport
from psengine.parameter_server.client.stalls import StallWatch
from psengine.parameter_server.client.steps import Step, Steps
from psengine.protocol.layout import ChunkSpec, job_number
from psengine.protocol.messages import NOBODY, ErrorCode, Message, MessageType
from psengine.protocol.views import View, view_of
from psengine.tracing.stall_inspector import stall_after_s
from psengine.tracing.telemetry import Telemetry

logger = logging.getLogger(__name__)

# Request ids lie above any step, so that an ERROR's sequence tells which of the two it is about.
FIRST_REQUEST = 1 << 40
# Decisions since the view, for shards that a new connection is made to: a shard has taken earlier ones.
KEPT_RELEASES = 64


@dataclass(slots=True)
class Identity:
    """Who this client is: its job's number, its rank (NOBODY for readers and before WELCOME), which process it is."""

    job: int
    worker: int = NOBODY
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class StateRequest:
    """A joiner wants the state of this worker."""

    rank: int
    incarnation: int


class JobConnection:
    """See the module's text.

    Args:
        options: of the session.
        runtime: the clock and sockets.

    Attributes:
        identity: who this client is.
        nonce: tells the coordinator this client from others that claim its rank.
        control: the connection to the coordinator; a reader never opens it.
        links: one per shard, the lead's first.
        server_sizes: number of shards of each server, in the order of addresses.
        chunks: where the job's chunks are.
        state: what WELCOME said last; see ``WorkerSession.state``.
        key, registration_number: the job's, by WELCOME.
        view, view_number, view_message: the view that this worker is in; None, 0 before.
        empty_view: a view without workers, with which a job begins anew.
        releases: the decisions that came since.
        is_member: whether that view counts.
        has_entered, has_state: a view had this worker once; it gave the job its values, or has pushed.
        is_leaving, has_failed: LEAVE was said; the training broke off.
        news: grows with each WELCOME and each view.
        steps: what this worker exchanges.
        configured: chunk's key -> CONFIGURE's body, sent again to a server whose snapshot is older.
        lease_s, heartbeat_s: as the coordinator said.
        telemetry: the counters in this worker's heartbeats.
        fenced: why exchanges need a rejoin first; None while they go on.
        last_view: the number of the last view that had this worker.
        has_asked: the coordinator has heard that this worker lacks state: a view that has it is one that it joins by.
        fatal: why nothing can go on; None while it can.
        state_request: a joiner that waits for this worker's state.
        closing: set when the session ends.
    """

    transport: Transport

    def __init__(self, options: SessionOptions, runtime: Runtime) -> None:
        self.options = options
        self.runtime = runtime
        self.identity = Identity(job_number(options.job))
        self.nonce = secrets.randbits(64) if options.nonce is None else options.nonce
        self.links: list[Link] = []
        self.server_sizes: list[int] = []
        self.chunks = ChunkMap()
        self.state = ""
        self.key: bytes | None = None
        self.registration_number = 0
        self.view: View | None = None
        self.view_number = 0
        self.view_message: Message | None = None
        self.empty_view: Message | None = None
        self.releases: deque[Message] = deque(maxlen=KEPT_RELEASES)
        self.is_member = self.has_entered = self.has_state = False
        self.is_leaving = self.has_failed = False
        self.news = 0
        self.configured: dict[int, dict[str, Any]] = {}
        self.lease_s, self.heartbeat_s = 5.0, 1.0
        self.telemetry = Telemetry(runtime.now_s)
        self.fenced: FencedError | None = None
        self.has_asked = False
        self.last_view = 0
        self.fatal: PSEngineError | None = None
        self.parking = Parking(runtime.now_s)
        self.state_request: StateRequest | None = None
        self.closing = threading.Event()
        self.steps = Steps(self._hand_over, is_shared=options.averages)
        self._preparing = False  # PREPARE came, and the view did not yet
        self._ids = itertools.count(FIRST_REQUEST)
        self._stalls = StallWatch(stall_after_s())
        self.control = Control(self, options.addresses[0])
        self.transport = runtime.connect(self)

    def __str__(self) -> str:
        """Who this is, for the log."""
        rank = self.identity.worker
        return f"{'a reader' if rank == NOBODY else f'worker {rank}'} of job {self.options.job!r}"

    # ---- asking; any thread ------------------------------------------------------------------------------------

    def next_id(self) -> int:
        """A request's id."""
        return next(self._ids)

    def open(self, channel: Channel) -> None:
        """Begin a connection."""
        self.transport.do(lambda: channel.open(self.runtime.now_s()))

    def add_link(self, address: str) -> Link:
        """Connect to one more shard."""
        link = Link(self, len(self.links), address)
        self.links.append(link)
        self.open(link)
        return link

    def first_links(self) -> list[Link]:
        """Each server's first shard; the other shards' links follow all of these."""
        return self.links[: len(self.options.addresses)]

    def submit(self, push: Push) -> None:
        """Hand a push to the I/O thread.

        Raises:
            PSEngineError: the session has failed or is closed.
        """
        if self.fatal is not None:
            raise self.fatal.with_traceback(None)
        self.transport.do(self._begin_push, push)

    def _begin_push(self, push: Push) -> None:
        error = self.fatal or self.fenced
        if error is not None:
            push.fail(error)
        else:
            self.has_state = True
            push.link.begin_push(push, self.runtime.now_s())

    def ask(
        self,
        channel: Channel,
        message: Message,
        *,
        timeout_s: float | None = None,
        **options: Any,
    ) -> Request:
        """Begin a request; its id is set here. The options are those of ``Request``.

        Raises:
            PSEngineError: the session has failed or is closed.
        """
        if self.fatal is not None:
            raise self.fatal.with_traceback(None)
        message.sequence = self.next_id()
        request = Request(message, self.parking, self.options.timeout_s if timeout_s is None else timeout_s, **options)
        self.transport.do(self._begin, channel, request)
        return request

    def _begin(self, channel: Channel, request: Request) -> None:
        if self.fatal is not None:
            request.fail(self.fatal)
        elif self.fenced is not None and request.message.type is MessageType.STORE:
            request.fail(self.fenced)
        else:
            channel.begin(request)

    def register(self, link: Link, spec: ChunkSpec, values: torch.Tensor | None, **options: Any) -> Request:
        """Begin to REGISTER a chunk; without values only what it is."""
        described = spec.to_body()
        body = {"kind": described["kind"], "segments": described["segments"]}
        message = Message(MessageType.REGISTER, key=spec.key, body=body, payload=values)
        message.dtype, message.numel = spec.dtype, spec.numel
        size_bytes = 0 if values is None else spec.size_bytes
        return self.ask(link, message, what=f"REGISTER of {spec.describe()}", size_bytes=size_bytes, **options)

    def begin_registration(self) -> None:
        """Show the job's key to all shards; the I/O thread."""
        for link in self.links:
            link.is_registrar = True
            link.greet(self.runtime.now_s())

    def registration(self) -> dict[str, Any]:
        """RESUME's body of who registers chunks."""
        body = {"job": self.options.job, "rule": self.options.whole_rule}
        return {**body, "registration": self.registration_number, "key": self.key}

    # ---- steps -------------------------------------------------------------------------------------------------

    def _hand_over(self, step: Step) -> None:
        self.transport.do(self._close_step, step)

    def _close_step(self, step: Step) -> None:
        step.is_closed = True
        self.confirm(step)
        self.steps.advance()

    def confirm(self, step: Step) -> None:
        """A step has ended, or is pushed again: where the coordinator decides, tell it once every shard has it."""
        if not self.options.has_decisions or not step.is_closed or not step.pushes:
            return
        if step.has_failed or self.fatal is not None:
            return
        step.attempt += 1
        attempt, links = step.attempt, {push.link.index: push.link for push in step.pushes}
        missing = set(links)

        def taken(index: int, answer: Message | PSEngineError) -> None:
            missing.discard(index)
            if not missing and not isinstance(answer, PSEngineError) and attempt == step.attempt:
                self.control.commit("step", step=step.number, abstained=not step.has_values)

        for index, link in links.items():
            message = Message(MessageType.ECHO, payload=torch.empty(0, dtype=torch.uint8))
            self.ask(link, message, what=f"step {step.number}", then=partial(taken, index), follows_pushes=True)

    def was_taken_back(self, answer: Message) -> bool:
        """Whether an answer to a push is of an earlier view, and of a step that the view begins anew."""
        view = self.view
        if view is None or not self.options.averages:
            return False
        return answer.view < view.number and answer.sequence >= view.from_step

    def fail_push(self, push: Push, error: PSEngineError) -> None:
        """End a push without an answer, and what depends on it."""
        if push.is_done:
            return
        push.link.end(push, error)
        for other in self.steps.failed(push):
            other.link.end(other, error)

    # ---- membership; the I/O thread ----------------------------------------------------------------------------

    def welcomed(self, message: Message, now_s: float, *, is_same: bool) -> None:
        """The coordinator lets this client in; ``is_same``: the same life of it as before."""
        body = message.body
        self.identity.worker, self.identity.incarnation = message.worker, message.incarnation
        self.lease_s, self.heartbeat_s = body["lease_s"], body["heartbeat_s"]
        self.state = body["state"]
        self.key = body.get("key", self.key)
        self.registration_number = body.get("registration", self.registration_number)
        self.news += 1
        for link in self.links:
            if link.is_registrar and not self.is_member and (self.state != "initialise" or not link.is_up):
                link.is_registrar = self.state == "initialise"  # a shard may have refused it, and take it now
                link.greet(now_s)
        is_out = self.state in ("join", "initialise") and self.options.averages
        if is_out and self.fenced is None and (self.is_member or self.has_entered):
            self._fence()
        elif is_same and not self._preparing:
            self.steps.is_frozen = False
            self.steps.advance()
        self._go_on(now_s)
        self.control.met(message, now_s)

    def forget_view(self, now_s: float) -> None:
        """Enter anew: for shards, too, this worker is not at work."""
        was_in, self.is_member = self.view is not None, False
        self.view, self.view_number, self.view_message = None, 0, None
        for link in self.links if was_in else ():
            link.greet(now_s)

    def freeze(self) -> None:
        """Where servers average: complete no step, because the others may take this one back."""
        self.steps.is_frozen = self.options.averages

    def prepare(self, number: int) -> None:
        """PREPARE: a view will come."""
        self._preparing = True
        self.freeze()
        self.control.commit("prepared", view=number, completed=self.steps.completed)

    def receive_view(self, message: Message, now_s: float) -> None:
        """VIEW: adopt it, and forward it to every shard."""
        view = view_of(message.body)
        me = view.member(self.identity.worker)
        is_mine = me is not None and me.incarnation == self.identity.incarnation
        if not view.members:
            self.empty_view = message
            for link in self.links:
                link.forward(message)
        is_new = view.number > self.view_number
        if view.number < self.view_number or not (is_mine or self.is_member):
            return
        if self.fenced and not (self.has_asked and is_new):
            return
        if not is_mine:
            for link in self.links if view.members else ():  # who leaves tells the shards
                link.forward(message)
            if not self.is_leaving and self.options.averages:
                self._fence()
                self.control.greet(now_s)
            return
        assert me is not None
        self.view, self.view_number, self.view_message, self.empty_view = view, view.number, message, None
        self.last_view = view.number
        self._preparing = self.steps.is_frozen = False
        if not self.is_member:
            self.is_member = True
            is_fresh = not self.has_state if self.options.averages else self.steps.completed == 0
            self.steps.begin_at(me.first_step, anew=is_fresh, from_step=view.from_step)
        elif not self.options.averages:
            self.steps.begin_at(me.first_step, anew=False)
        if is_new:
            self.releases.clear()
            self._adopt(view, now_s)
        self.steps.advance()
        self.news += 1
        self.control.met(message, now_s)

    def _adopt(self, view: View, now_s: float) -> None:
        """Tell every shard of a new view, and who this worker is in it."""
        if self.options.averages:
            for link in self.links:
                link.clear()
            for push in self.steps.take_back(view.from_step):
                push.link.waiting.append(push)
        for link in self.links:
            link.is_registrar = link.is_registrar and not self._is_named(link)
            link.greet(now_s)
        for step in self.steps.open:
            self.confirm(step)

    def check_servers(self) -> None:
        """Raise ConfigurationError where this worker has other servers than the job, or another order; any thread."""
        view, mine = self.view, [link.epoch for link in self.first_links()]
        assert view is not None
        theirs = list(view.shards[: len(mine)])
        if len(self.links) != len(view.shards) or (sorted(mine) == sorted(theirs) and mine != theirs):
            raise ConfigurationError(
                f"{self} names other servers than the job's other workers, or in another order (expected"
                f" {len(view.shards)} shards, got {len(self.links)}: {', '.join(link.address for link in self.links)})."
                " Fix: give every worker the same PSENGINE_SERVERS."
            )

    def _return_results(self, link: Link) -> None:
        """Give a restarted shard the averages that it lost, where the view names this worker for that."""
        view, kept = self.view, self.steps.kept
        if view is None or view.donor != self.identity.worker or kept is None or kept.number != view.from_step - 1:
            return
        for push in kept.pushes if link.may_push else ():
            answer = push.answer
            if push.link is link and answer is not None and answer.payload is not None and answer.epoch != link.epoch:
                link.send(push.result())

    def receive_release(self, message: Message) -> None:
        """RELEASE: forward it to every shard."""
        self.releases.append(message)
        for link in self.links:
            link.forward(message)

    def hear_joiner(self, rank: int, incarnation: int) -> None:
        """STATE_WANTED."""
        self.state_request = StateRequest(rank, incarnation)

    def begin_again(self) -> None:
        """Join once more, though the view has this worker: it lacks state; the I/O thread."""
        self._fence()
        self.state = "join"
        self.news += 1

    def ask_to_join(self, last_view: int) -> Request:
        """COMMIT "join"; ``last_view``: that this worker was in, and is not, or without its state."""

        def heard(answer: Message | PSEngineError) -> None:
            self.has_asked = not isinstance(answer, PSEngineError)

        message = Message(MessageType.COMMIT, view=last_view, body={"what": "join"})
        return self.ask(self.control, message, what=f"COMMIT 'join' of {self}", then=heard)

    def _fence(self) -> None:
        self.has_state = self.has_asked = False
        self.is_member, self.state = False, "join" if self.state == "join" else ""
        self._preparing = self.steps.is_frozen = False
        self.fenced = FencedError(
            f"{self} was away for longer than its lease, and the others went on without it. It has to take over their"
            " state first (rejoin). Where that happens often, raise the servers' --lease-s.",
            ErrorCode.FENCED,
        )
        for link in self.links:
            link.may_push = False
            for operation in reversed(link.open_operations()):
                if operation.message.type in (MessageType.PUSH, MessageType.STORE, MessageType.ECHO):
                    link.fail(operation, self.fenced)
        self._fail_steps(self.fenced)

    # ---- shards; the I/O thread --------------------------------------------------------------------------------

    def resumed(self, link: Link, former_epoch: int, now_s: float) -> None:
        """A shard has answered RESUME; ``former_epoch`` is that of its life before."""
        expected, got = self.server_sizes[link.index : link.index + 1], len(link.resumed["shards"])
        if former_epoch not in (0, link.epoch):
            link.is_reborn, link.lost = True, 0
            self._look_for_losses(link)
            if expected and expected[0] != got:
                problem = f"with another number of shards (expected {expected[0]}, got {got}). Start it with --shards"
                self._fail_at(link, f"{problem} {expected[0]}, or start the workers again.")
                return
            if link.lost and self._is_named(link):
                self._commit_life(link, 0)  # another worker has told of the restart, and may have known of less
        chunks, got = len(self.chunks.at(link.index)), link.resumed["chunks"]
        lacks_specs = self.options.averages and got < chunks  # who told of its new life did not know them yet
        if self.is_member and (link.is_registrar or lacks_specs or not self._is_named(link)):
            self._restore(link, now_s)
            return
        if self.is_member and not self.options.averages and got < chunks:
            problem = f"without weights of job {self.options.job!r} (expected {chunks} chunks, got {got}): it was"
            fix = "Start the servers with --snapshot-dir, and the workers again from a checkpoint."
            self._fail_at(link, f"{problem} restarted without a snapshot that has them. {fix}")
            return
        self._refresh(now_s)
        if link.is_reborn and self.is_member:
            self._configure(link)
        if link.may_push:
            self._return_results(link)
        link.pump(now_s)

    def _fail_at(self, link: Link, problem: str) -> None:
        """A server has come back without what it had."""
        self.fail(ServerRefusedError(f"{link.address} came back {problem}", ErrorCode.STATE_LOST))

    def _is_named(self, link: Link) -> bool:
        """Whether the view knows this life of the shard."""
        shards = () if self.view is None else self.view.shards
        return link.index < len(shards) and link.epoch == shards[link.index]

    def _restore(self, link: Link, now_s: float) -> None:
        """A shard has begun a new life: tell the coordinator, once the shard knows its chunks where it averages."""
        specs, resumed = self.chunks.at(link.index), link.resumed
        is_missing = resumed["chunks"] < len(specs)
        if not link.is_registrar and (is_missing or not resumed["view"]) and (self.options.averages or not specs):
            link.is_registrar = True
            link.greet(now_s)
            return
        if not (is_missing and self.options.averages):
            self._restored(link)
            return
        logger.warning("registering %d chunks of job %r at %s again", len(specs), self.options.job, link.address)
        missing, epoch = {spec.key for spec in specs}, link.epoch

        def registered(key: int, answer: Message | PSEngineError) -> None:
            missing.discard(key)
            if not missing and link.epoch == epoch and not isinstance(answer, PSEngineError):
                self._restored(link)

        for spec in specs:
            self.register(link, spec, None, then=partial(registered, spec.key))

    def _restored(self, link: Link) -> None:
        """The shard knows the job's chunks and its key."""
        if self._is_named(link):
            link.is_registrar = False
            link.greet(self.runtime.now_s())
        else:
            self.tell_life(link)

    def receive_stale(self, link: Link, held: int, now_s: float) -> None:
        """A shard does not take the view: it holds that number, ``held`` or more, or another registrar's key."""
        if held >= self.view_number:
            self.tell_life(link, held)
        elif self.is_member and self._is_named(link) and link.told_key != self.view_number:
            link.told_key, link.is_registrar = self.view_number, True
            link.greet(now_s)

    def is_lost(self, link: Link) -> bool:
        """Whether the shard has begun a new life that the view does not know."""
        return self.is_member and not self._is_named(link)

    def tell_life(self, link: Link, view: int = 0) -> None:
        """COMMIT "life": the shard has another epoch than the view names, or that view's number from elsewhere."""
        held = max(view, link.resumed.get("view", 0))
        told = (link.epoch, held, self.view_number)
        if told == link.told_life or not link.epoch or not self.is_member:
            return
        link.told_life = told
        self._commit_life(link, held)

    def _commit_life(self, link: Link, held: int) -> None:
        chunks, version = len(self.chunks.at(link.index)), link.resumed["version"]
        if not self.options.averages:
            chunks = link.resumed["chunks"]
        life = {"shard": link.index, "epoch": link.epoch, "chunks": chunks, "version": version, "view": held}
        if link.lost:
            life["lost"] = link.lost
        self.control.commit("life", **life)

    def _configure(self, link: Link) -> None:
        """A server may come back with a snapshot that is older than its optimizers: before pushes, send them."""
        link.is_reborn = False
        for key, body in self.configured.items():
            if self.chunks.shard_of[key] == link.index:
                self.ask(link, Message(MessageType.CONFIGURE, key=key, body=body), what=f"CONFIGURE of chunk {key}")

    def _look_for_losses(self, link: Link) -> None:
        version = link.resumed["version"]
        known = min((link.versions.get(spec.key, 0) for spec in self.chunks.at(link.index)), default=0)
        if self.options.averages or version >= known:
            return
        link.lost = known - version
        link.versions = {key: min(version, one) for key, one in link.versions.items()}
        logger.warning(
            "%s came back with version %d of job %r, where %s knew of %d: %d updates of each chunk are lost",
            link.address,
            version,
            self.options.job,
            self,
            known,
            link.lost,
        )

    def _go_on(self, now_s: float) -> None:
        self._refresh(now_s)
        for link in self.links:
            link.pump(now_s)

    def _refresh(self, now_s: float) -> None:
        """Where pushes may go now."""
        heard_s = self.control.last_heard_s
        is_led = self.is_member and heard_s is not None and now_s - heard_s < self.lease_s
        may_push = is_led and not self.steps.is_frozen
        for link in self.links:
            link.may_push = may_push and link.is_up and self._is_named(link)

    def unreachable(self, now_s: float) -> list[int]:
        """The shards that this client could not reach for a lease."""
        return [link.index for link in self.links if now_s - link.down_since_s >= self.lease_s]

    # ---- endings -----------------------------------------------------------------------------------------------

    @property
    def channels(self) -> list[Channel]:
        """All connections."""
        return [self.control, *self.links]

    def fail(self, error: PSEngineError) -> None:
        """Nothing can go on: every operation ends with ``error``."""
        if self.fatal is None:
            self.fatal = error
        for channel in self.channels:
            for operation in reversed(channel.open_operations()):
                channel.fail(operation, self.fatal)
        self._fail_steps(self.fatal)

    def _fail_steps(self, error: PSEngineError) -> None:
        """End also the pushes whose answers are here, and did not count yet."""
        for step in tuple(self.steps.open):
            for push in step.pushes:
                self.fail_push(push, error)

    # ---- called by the transport -------------------------------------------------------------------------------

    def tick(self, now_s: float) -> None:
        """100 ms have passed."""
        if self.fatal is None:
            for channel in self.channels:
                channel.tick(now_s)
        self._go_on(now_s)
        self._stalls.look(self, self.channels, now_s)

    def crashed(self, error: PSEngineError) -> None:
        """The transport has ended."""
        self._stalls.look(str(self), self.channels, self.runtime.now_s())  # the end of a stall may be unseen yet
        self.fail(error)
        self.steps.forget()
