"""A client's part in a job with chunks: its connections to the shards, and the view it holds.

    the coordinator  PREPARE ─► freeze ─ COMMIT       VIEW ─► adopt, forward to every shard, push again what is open

Pure.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from typing_extensions import override

from psengine.errors import RAISE_LEASE, ConfigurationError, FencedError, PSEngineError, ServerRefusedError
from psengine.parameter_server.client.channel import Channel
from psengine.parameter_server.client.job_client import JobClient
from psengine.parameter_server.client.known_server import KnownServer
from psengine.parameter_server.client.link import Link
from psengine.parameter_server.client.operation import Push, Request
from psengine.parameter_server.client.options import SessionOptions
from psengine.parameter_server.client.runtime import Runtime
from psengine.parameter_server.client.steps import Step, Steps
from psengine.protocol.layout import ChunkSpec
from psengine.protocol.messages import ErrorCode, Message, MessageType
from psengine.protocol.views import View, other_servers, view_of
from psengine.tracing.stall_inspector import inspector

logger = logging.getLogger(__name__)


class ChunkMap:
    """The job's chunks and their shards.

    Attributes:
        specs: key -> chunk.
        shard_of: key -> index of the shard that holds it.
    """

    def __init__(self) -> None:
        self.specs: dict[int, ChunkSpec] = {}
        self.shard_of: dict[int, int] = {}

    def place(self, specs: Sequence[ChunkSpec], shards: Sequence[int]) -> None:
        """Replace the map."""
        self.shard_of = {spec.key: shard for spec, shard in zip(specs, shards, strict=True)}
        self.specs = {spec.key: spec for spec in specs}

    def at(self, shard: int) -> list[ChunkSpec]:
        """The chunks of one shard."""
        return [spec for key, spec in self.specs.items() if self.shard_of[key] == shard]


class JobConnection(JobClient):
    """See the module's text; ``options`` are the session's.

    Attributes:
        links: one per shard, the lead's first; ``has_all_links``: each server has said how many it has.
        chunks: where the job's chunks are.
        state: what WELCOME said last; see ``WorkerSession.state``.
        registration_number: the job's, by WELCOME.
        last_view: the number of the last view that had this worker.
        has_state: others may need what this worker has: it gave the job its values, or has pushed.
        has_changed: it has sent something that changes values.
        is_entering: this worker takes no values for granted: any view may have it, unless it was told to join.
        is_leaving, has_failed: LEAVE was said; the training broke off.
        steps: what this worker exchanges.
        configured: chunk's key -> CONFIGURE's body, sent again to a server whose snapshot is older.
        fenced: this worker has no place, and enters anew; None while it has one.
        has_asked: the coordinator has heard that this worker lacks state: a view that has it is one that it joins by.
        state_request: STATE_WANTED, while a joiner waits for this worker's state.
    """

    def __init__(self, options: SessionOptions, runtime: Runtime) -> None:
        self.links: list[Link] = []
        self.chunks = ChunkMap()
        self.state = ""
        self.registration_number = 0
        self.last_view = 0
        self.has_state = self.has_changed = self.is_entering = self.is_leaving = self.has_failed = False
        self.configured: dict[int, dict[str, Any]] = {}
        self.fenced: FencedError | None = None
        self.has_asked = self.has_all_links = False
        self.state_request: Message | None = None
        self.steps = Steps(lambda step: self.transport.do(self._close_step, step), is_shared=options.averages)
        self._awaited_view = 0  # its number or a later one ends what PREPARE has frozen; 0 where nothing is
        super().__init__(options, runtime)

    # ---- asking; any thread ------------------------------------------------------------------------------------

    def add_link(self, server: KnownServer, shard: int = 0) -> Link:
        """Connect to one more shard."""
        link = Link(self, len(self.links), server, shard)
        self.links.append(link)
        self.open(link)
        return link

    def first_links(self) -> list[Link]:
        """Each server's first shard; the other shards' links follow all of these."""
        return self.links[: len(self.options.addresses)]

    @property
    def is_joining(self) -> bool:
        """Whether this worker begins with another's state."""
        return self.state in ("join", "joined")

    def begin_push(self, push: Push) -> None:
        """A push was made; the I/O thread."""
        if (error := self.fatal or self.fenced) is not None:
            push.fail(error)
            return
        self.has_state = self.has_changed = True
        self.steps.begin(push)
        push.link.waiting.append(push)
        push.link.pump()

    @override
    def begin(self, channel: Channel, request: Request) -> None:
        self.has_changed |= request.message.type is MessageType.STORE
        super().begin(channel, request)

    def register(self, link: Link, spec: ChunkSpec, values: torch.Tensor | None, **options: Any) -> Request:
        """Begin to REGISTER a chunk; without values only what it is."""
        body = {name: value for name, value in spec.to_body().items() if name not in ("key", "dtype")}
        payload = None if values is None else values.detach()
        message = Message(MessageType.REGISTER, key=spec.key, body=body, payload=payload)
        message.dtype, message.numel = spec.dtype, spec.numel
        size_bytes = 0 if values is None else spec.size_bytes
        return self.ask(link, message, what=f"REGISTER of {spec.describe()}", size_bytes=size_bytes, **options)

    def greeting(self, link: Link) -> dict[str, Any]:
        """RESUME's body: who does not know the job's key is a reader."""
        if self.view is None and self.state != "initialise":
            return {}
        body = {"job": self.options.job, "rule": self.options.whole_rule}
        place = [link.index, len(self.links) if self.has_all_links else 0, len(self.options.addresses)]
        return {**body, "registration": self.registration_number, "key": self.key, "place": place}

    # ---- steps -------------------------------------------------------------------------------------------------

    def _close_step(self, step: Step) -> None:
        step.is_closed = True
        self.confirm(step)
        self.steps.advance()

    def confirm(self, step: Step) -> None:
        """A step has ended, or is pushed again: where the coordinator decides, tell it once every shard has it."""
        if not self.options.has_decisions or not step.is_closed or self.fatal is not None:
            return
        if not step.pushes or any(push.error for push in step.pushes):
            return
        step.attempt += 1
        attempt, links = step.attempt, {push.link.index: push.link for push in step.pushes}
        missing = set(links)

        def taken(index: int, answer: Message | PSEngineError) -> None:
            missing.discard(index)
            if not missing and not isinstance(answer, PSEngineError) and attempt == step.attempt:
                values = {"abstained": not step.has_values, "completed": self.steps.completed}
                self.control.commit("step", step=step.number, **values)

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
        """End a push without an answer, and where servers average its step."""
        for one in (push, *self.steps.failed(push)):
            one.link.drop(one)
            one.fail(error)

    # ---- membership; the I/O thread ----------------------------------------------------------------------------

    @override
    def hello(self, now_s: float) -> dict[str, Any]:
        if self.options.averages and not self.has_state:
            self.leave_view(now_s)  # who has no state does not keep a job alive
        if self.view is None:
            return {}
        self.freeze()
        return self.membership(self.steps.completed) | {"unreachable": self.unreachable(now_s)}

    @override
    def progress(self, now_s: float) -> dict[str, Any]:
        late_s = now_s - self.heartbeat_s
        is_blocked = any(push.submitted_s <= late_s for link in self.links for push in link.sent.values())
        progress = {"completed": self.steps.completed, "blocked": is_blocked, "unreachable": self.unreachable(now_s)}
        if self.options.merges and not self.options.keeps_step and inspector.waited_s() >= self.heartbeat_s:
            progress["elsewhere"] = True
        return progress

    @override
    def welcomed(self, message: Message, now_s: float, *, is_same: bool) -> None:
        super().welcomed(message, now_s, is_same=is_same)
        body, former = message.body, self.state
        self.state = body["state"]
        self.registration_number = body.get("registration", self.registration_number)
        if not is_same:
            self._awaited_view = self.view_number + 1  # the others may go on from another step
            self.has_asked = False
        self._thaw()
        if self.options.averages and self.state in ("join", "initialise") and self.last_view and self.fenced is None:
            self._lose_place(now_s)
        if self.view is None and "initialise" in (former, self.state):
            self._greet_shards(now_s)
        self.news += 1
        self._go_on(now_s)
        self.control.met(message)

    def freeze(self) -> None:
        """Where servers average: complete no step, because the others may take this one back."""
        self.steps.is_frozen = self.options.averages

    def _thaw(self) -> None:
        self.steps.is_frozen = self.options.averages and self._awaited_view > 0
        self.steps.advance()

    @override
    def prepare(self, number: int) -> None:
        self._awaited_view = number
        self.freeze()
        self.control.commit("prepared", view=number, completed=self.steps.completed)

    @override
    def receive_view(self, message: Message, now_s: float) -> None:
        """Adopt it, and forward it to every shard."""
        view = view_of(message.body)
        me = view.member(self.identity.worker)
        if me is None or me.incarnation != self.identity.incarnation:
            self._receive_foreign_view(message, now_s)
            return
        is_new, is_admitted = view.number > self.view_number, self.view is None
        if view.number < self.view_number:
            return
        is_joining = self.fenced is not None and not (self.is_entering and self.state != "join")
        if is_joining and not (self.has_asked and view.number > self.last_view):
            return
        self.view, self.view_number, self.view_message, self.last_view = view, view.number, message, view.number
        self.fenced = None
        # It may push while it says HELLO again.
        self.steps.begin_at(me.first_step, anew=is_admitted and not self.has_state, from_step=view.from_step)
        self.has_state = self.has_state or (is_admitted and self.state == "initialise")
        if self.options.keeps_step and self.steps.completed + 1 < me.first_step:
            # It would wait for others' next step, and they, elsewhere, for this one's.
            missed = f"{self.steps.completed + 1} to {me.first_step - 1}"
            text = (
                f"{self} was away for longer than its lease, and the others took steps {missed} without it (expected a"
                f" worker that takes all). Fix: {RAISE_LEASE}, and start this worker again."
            )
            self.fail(FencedError(text, ErrorCode.FENCED))
            return
        if is_new:
            self._adopt(view, now_s)
        if view.number >= self._awaited_view:
            self._awaited_view = 0
        self._thaw()
        self.news += 1
        self.control.met(message)

    def _receive_foreign_view(self, message: Message, now_s: float) -> None:
        """A view without this worker, which leaves, is to begin the job anew, or was put out."""
        for link in self.links:
            link.send(message)
        if self.view is None:
            self.view_message = message
        elif self.options.averages and not self.is_leaving:
            self.control.greet(now_s)  # the answer says why

    def _adopt(self, view: View, now_s: float) -> None:
        """Tell every shard of a new view, and who this worker is in it."""
        self.releases.clear()
        if self.options.averages:
            for link in self.links:
                link.clear()
            for push in self.steps.take_back(view.from_step):
                push.link.waiting.append(push)
        self._greet_shards(now_s)
        for step in self.steps.open:
            self.confirm(step)

    def _greet_shards(self, now_s: float) -> None:
        for link in self.links:
            link.greet(now_s)

    def check_servers(self) -> None:
        """Raise ConfigurationError where this worker has other servers than the job, or another order; any thread."""
        view, mine = self.view, [link.epoch for link in self.first_links()]
        if view is None:
            return
        differs = other_servers(self.options.job, view, len(mine), len(self.links))
        theirs = list(view.shards[: len(mine)])
        if not differs and sorted(mine) == sorted(theirs) and mine != theirs:
            differs = other_servers(self.options.job, view)
        if differs:
            raise ConfigurationError(f"{differs} {self.named()}")

    def named(self) -> str:
        """The servers that this worker names, for an error."""
        return f"(got {', '.join(self.options.addresses)})"

    def _report_answers(self, link: Link) -> None:
        """Report to a restarted shard the answers that its former life gave to this worker.

        The view's donor returns the averages. Under "merge" a worker renounces each answered chunk of its open steps,
        by a push without a payload. Else the merge would wait for the worker's next step, and that step for another
        merge.
        """
        view, kept, averages = self.view, self.steps.kept, self.options.averages
        steps = self.steps.open if self.options.merges else []
        if averages and view is not None and view.donor == self.identity.worker and kept is not None:
            steps = [kept] if kept.number == view.from_step - 1 else []
        for push in [push for step in steps for push in step.pushes if push.link is link]:
            if push.answer is not None and push.answer.epoch != link.epoch:
                renounced = Message(MessageType.PUSH, key=push.key, sequence=push.step.number)
                link.send(push.result() if averages else renounced)

    @override
    def receive_state_wanted(self, message: Message) -> None:
        self.state_request = message

    @override
    def receive_release(self, message: Message) -> None:
        """Forward it to every shard."""
        self.releases.append(message)
        for link in self.links:
            link.send(message)

    def ask_to_join(self, last_view: int) -> Request:
        """COMMIT "join"; ``last_view``: that this worker was in, and is not, or without its state."""

        def heard(answer: Message | PSEngineError) -> None:
            self.has_asked = isinstance(answer, Message)

        message = Message(MessageType.COMMIT, view=last_view, body={"what": "join"})
        return self.ask(self.control, message, what=f"COMMIT 'join' of {self}", then=heard)

    def leave_view(self, now_s: float) -> None:
        """Enter anew: for shards, too, this worker is not at work."""
        if self.view is not None:
            self.view, self.view_number, self.view_message = None, 0, None
            self._greet_shards(now_s)

    def _lose_place(self, now_s: float) -> None:
        """The others went on without this worker: it enters anew, or where it has entered, ends."""
        self.has_state, self.has_asked, self._awaited_view = False, False, 0
        self.fenced = FencedError(
            f"the others of {self} went on without it, before its first step (expected to be heard in each lease of"
            f" {self.lease_s:g} s). Fix: start it again; where such pauses are normal, {RAISE_LEASE}.",
            ErrorCode.FENCED,
        )
        if not self.is_entering:
            self.fail(self.fenced)
        self.leave_view(now_s)

    # ---- shards; the I/O thread --------------------------------------------------------------------------------

    def resumed(self, link: Link, former_epoch: int, now_s: float) -> None:
        """A shard has answered RESUME: send what waits; ``former_epoch`` is that of its life before."""
        if self.view is None:
            link.greeted(now_s)
            return
        specs, got = self.chunks.at(link.index), link.resumed["chunks"]
        # Who has just come learns from the view alone how many chunks are to be here.
        in_view = 0 if self.options.averages else sum(self.view.chunks[link.index : link.index + 1])
        expected = max(len(specs), in_view)
        link.has_chunks = got >= expected
        # Sends the requests: once it is known whether the chunks are there, for a shard may lose them within one life
        # (to another registration of the job), and before any push, which CONFIGURE has to precede.
        link.greeted(now_s)
        differs, first = "", self.view.shards[: len(self.options.addresses)]
        if link.index < len(first) and link.epoch in first and self.is_lost(link):  # no new life, but another server
            differs = other_servers(self.options.job, self.view)
        elif in_view and not got and self.view.servers != tuple(self.options.addresses):
            differs = other_servers(self.options.job, self.view, why=f"with {link.name} among them, which has none")
        if differs:
            self.fail(ConfigurationError(f"{differs} {self.named()}"))
            return
        if link.has_chunks:
            self._take_back_up(link, now_s, self._lost_at(link) if former_epoch not in (0, link.epoch) else 0)
        elif self.options.averages:
            self._register_again(link, specs)
        else:
            text = (
                f"job {self.options.job!r} is lost: {link.address} is without its weights (expected {expected} chunks,"
                f" got {got}): it came back from no snapshot that has them, or with another number of shards, or they"
                f" were dropped. Fix: psengine admin forget --job {self.options.job} at each server, then start the"
                " workers again from a checkpoint; servers with --snapshot-dir keep weights."
            )
            self.fail(ServerRefusedError(text, ErrorCode.STATE_LOST))

    def _lost_at(self, link: Link) -> int:
        """How many updates of each chunk a restarted shard lacks; its optimizers may be older, too."""
        for key, body in self.configured.items():
            if self.chunks.shard_of[key] == link.index:
                self.ask(link, Message(MessageType.CONFIGURE, key=key, body=body), what=f"CONFIGURE of chunk {key}")
        version: int = link.resumed["version"]
        known = min((link.versions.get(spec.key, 0) for spec in self.chunks.at(link.index)), default=0)
        if self.options.averages or version >= known:
            return 0
        link.versions = {key: min(version, one) for key, one in link.versions.items()}
        logger.warning(
            "%s came back with version %d of job %r, where %s knew of %d: %d updates of each chunk are lost",
            link.address,
            version,
            self.options.job,
            self,
            known,
            known - version,
        )
        return known - version

    def _register_again(self, link: Link, specs: list[ChunkSpec]) -> None:
        """A shard that averages has begun a new life: it has to know its chunks."""
        logger.warning("registering %d chunks of job %r at %s again", len(specs), self.options.job, link.address)
        missing, epoch = {spec.key for spec in specs}, link.epoch

        def registered(key: int, answer: Message | PSEngineError) -> None:
            missing.discard(key)
            if not missing and link.epoch == epoch and self.view is not None and isinstance(answer, Message):
                link.has_chunks = True
                self._take_back_up(link, self.runtime.now_s())

        for spec in specs:
            self.register(link, spec, None, then=partial(registered, spec.key))

    def _take_back_up(self, link: Link, now_s: float, lost: int = 0) -> None:
        """The shard has its chunks: go on, or tell the coordinator what keeps it from taking the view."""
        view, held = self.view, link.resumed["view"]
        assert view is not None
        is_named = not self.is_lost(link)
        # A shard refuses a number that another coordinator has used.
        is_ahead = held >= view.number and link.resumed["view_epoch"] != view.epoch
        if lost or is_ahead or not is_named:
            chunks = len(self.chunks.at(link.index)) if self.options.averages else link.resumed["chunks"]
            life = {"shard": link.index, "epoch": link.epoch, "chunks": chunks, "version": link.resumed["version"]}
            if lost:
                life["lost"] = lost
            self.control.commit("life", **life, view=held if is_ahead or not is_named else 0)
        if is_named and held < view.number:
            link.retry_at_s = now_s  # it has learnt the job's key, and will take the view
            return
        self._refresh(now_s)
        link.pump()

    def is_lost(self, link: Link) -> bool:
        """Whether the shard has begun a new life that the view does not know."""
        return self.view is not None and link.epoch not in self.view.shards[link.index : link.index + 1]

    def _go_on(self, now_s: float) -> None:
        self._refresh(now_s)
        for link in self.links:
            link.pump()

    def _refresh(self, now_s: float) -> None:
        """Where pushes may go now."""
        heard_s = self.control.last_heard_s
        is_led = self.view is not None and heard_s is not None and now_s - heard_s < self.lease_s
        may_push = is_led and not self.steps.is_frozen
        for link in self.links:
            could_push = link.may_push
            link.may_push = may_push and link.is_up and link.has_chunks and not self.is_lost(link)
            if link.may_push and not could_push:
                self._report_answers(link)

    def unreachable(self, now_s: float) -> list[int]:
        """The shards that this client could not reach for a lease."""
        return [link.index for link in self.links if now_s - link.down_since_s >= self.lease_s]

    # ---- endings -----------------------------------------------------------------------------------------------

    @property
    @override
    def channels(self) -> list[Channel]:
        return [self.control, *self.links]

    @override
    def fail(self, error: PSEngineError) -> None:
        super().fail(error)
        for step in tuple(self.steps.open):  # end also pushes whose answers are here, and did not count yet
            for push in step.pushes:
                if not push.is_done:
                    self.fail_push(push, self.fatal or error)

    # ---- called by the transport -------------------------------------------------------------------------------

    @override
    def tick(self, now_s: float) -> None:
        super().tick(now_s)
        self._go_on(now_s)

    @override
    def crashed(self, error: PSEngineError) -> None:
        super().crashed(error)
        self.steps.forget()
