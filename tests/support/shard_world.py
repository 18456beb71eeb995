"""A shard without sockets, and workers that speak to it: messages go through the codec, the clock is ours."""

from __future__ import annotations

import copy
import itertools

import torch
import xxhash

from psengine.parameter_server.server.interfaces import Clocks, Sender, ShardSettings
from psengine.parameter_server.server.core.shard import Shard
from psengine.protocol.frames import decode, encode, payload_tensor
from psengine.protocol.layout import ChunkKind, ChunkSpec, Segment, job_number, layout_fingerprint
from psengine.protocol.messages import DTYPE_NUMBERS, NO_KEY, NOBODY, ErrorCode, Message, MessageType

AVERAGE = {"name": "average", "quorum": None}
APPLY = {"name": "apply", "max_staleness": None, "staleness_scaling": None, "delay_compensation": 0.0}
SGD = {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}

# What the wall clock of a world shows at its time 0.
WALL_S = 1.7e9
_nonces = itertools.count(1000)


def spec(key=0, numel=4, dtype=torch.float32, kind=ChunkKind.PARAMETER, name=None):
    return ChunkSpec(key, kind, dtype, numel, (Segment(name or f"p{key}", (numel,), (1,), 0, numel),))


class World:
    """One shard and the time. ``sent`` collects everything that left, per route."""

    def __init__(self, *, epoch=7, lease_s=5.0, codec=True, **settings):
        self.settings = ShardSettings(lease_s=lease_s, software="test", **settings)
        self.codec = codec
        self.measure_s = lambda: self.now_s
        self.clocks = Clocks(wall_s=lambda: WALL_S + self.now_s, measure_s=lambda: self.measure_s())
        self.now_s = 100.0
        self.sent = {}
        self.start(epoch)

    def start(self, epoch, states=None):
        """The server process starts (again)."""
        self.shard = Shard(0, epoch, self.settings, self.clocks)
        self.shard.shard_addresses = ["tcp://127.0.0.1:1"]
        if states is not None:
            self.shard.restore(states, self.now_s)

    def restart(self, workers, specs, *, comes_back=None):
        """A server without a snapshot starts; workers (or some) come back in this order, the lowest brings chunks."""
        self.advance(1, *workers)  # heartbeats tell who is alive
        for worker in workers:
            worker.take()
        self.start(self.shard.epoch + 1)
        back = workers if comes_back is None else comes_back
        for worker in back:
            worker.hello(worker.incarnation)
        first = min(back, key=lambda worker: worker.rank, default=None)
        if first is not None:
            assert first.state == "initialise"
            for one in specs:
                assert first.register(one).type is MessageType.OK
            first.seal(specs)
        for worker in back:
            assert worker.hello(worker.incarnation) == "ready"
            worker.take()

    def deliver(self, route, message, user_id="", codec=None):
        codec = self.codec if codec is None else codec
        if codec:
            message = decode([bytes(frame) for frame in encode(message)])
        return self._post(self.shard.handle(Sender(route, user_id), message, self.now_s), codec)

    def _post(self, outgoing, codec):
        posted = []
        for one in outgoing:
            message = one.message
            if codec:
                message = decode([bytes(frame) for frame in encode(message)])
            elif message.payload is not None:
                message = copy.copy(message)
                message.payload = message.payload.clone()
            self.sent.setdefault(one.route, []).append(message)
            posted.append((one.route, message))
        return posted

    def advance(self, seconds, *alive):
        """Time passes in steps of a tick; these workers send heartbeats."""
        end = self.now_s + seconds
        while self.now_s < end - 1e-9:
            self.now_s += min(0.5, end - self.now_s)
            for worker in alive:
                worker.heartbeat()
            self._post(self.shard.tick(self.now_s), self.codec)

    def state_hash(self):
        """Of values, versions and sequence tables of all jobs."""
        digest = xxhash.xxh3_64()
        for state in self.shard.durable.capture():
            digest.update(repr((state.name, state.meta)).encode())
            for chunk in state.chunks:
                digest.update(repr((chunk.key, chunk.meta)).encode())
                for name, tensor in sorted(chunk.tensors.items()):
                    digest.update(name.encode() + bytes(tensor.contiguous().view(torch.uint8).numpy()))
        for number, job in sorted(self.shard.jobs.by_number.items()):
            digest.update(repr((number, job.is_sealed, job.has_started, job.missing_ranks())).encode())
            digest.update(repr((job.membership.live_ranks, sorted(job.membership.members))).encode())
            digest.update(repr(sorted((k, len(v)) for k, v in job.chunks.blobs.items())).encode())
            for key, rule in sorted(job.chunks.rules.items()):
                digest.update(repr((key, rule.version, sorted(rule.progress.last_sequence.items()))).encode())
                digest.update(repr(sorted(getattr(rule, "_open", {}))).encode())
        return digest.intdigest()


class Worker:
    """A client of one shard."""

    def __init__(
        self,
        world,
        rank=None,
        *,
        job="demo",
        rule=AVERAGE,
        world_size=1,
        user_id="",
        nonce=None,
        role="worker",
    ):
        self.world, self.rank, self.job, self.rule, self.world_size = world, rank, job, rule, world_size
        self.user_id, self.role = user_id, role
        self.nonce = next(_nonces) if nonce is None else nonce
        self.route = f"route-{self.nonce}".encode()
        self.incarnation = self.epoch = 0
        self.worker = NOBODY
        self.state = None
        self.members = []
        self._ids = itertools.count(1 << 40)

    @property
    def inbox(self):
        return self.world.sent.setdefault(self.route, [])

    def take(self, *types):
        """Remove and return what came (of these types)."""
        taken = [m for m in self.inbox if not types or m.type in types]
        self.inbox[:] = [m for m in self.inbox if types and m.type not in types]
        return taken

    def send(self, kind, *, codec=None, **fields):
        fields.setdefault("worker", self.worker)
        fields.setdefault("incarnation", self.incarnation)
        fields.setdefault("epoch", self.epoch)
        if "sequence" not in fields:
            fields["sequence"] = next(self._ids)
        payload = fields.get("payload")
        if payload is not None:
            fields["dtype"], fields["numel"] = payload.dtype, payload.numel()
        fields.setdefault("job", job_number(self.job))
        message = Message(kind, **fields)
        return [m for route, m in self.world.deliver(self.route, message, self.user_id, codec) if route == self.route]

    def ask(self, kind, **fields):
        """Send; the one answer."""
        answers = self.send(kind, **fields)
        assert len(answers) == 1, answers
        self.take()
        return answers[0]

    def hello_body(self, **changes):
        body = {"job": self.job, "role": self.role, "nonce": self.nonce, "host": "h", "pid": 1, "software": "t"}
        body |= {"world_size": self.world_size, "rule": self.rule}
        if self.rank is not None:
            body["rank"] = self.rank
        if self.members:
            body["members"] = self.members
        return body | changes

    def hello(self, incarnation=0, **changes):
        """HELLO; the state in WELCOME, or the code of the ERROR."""
        answers = self.send(
            MessageType.HELLO, epoch=0, incarnation=incarnation, body=self.hello_body(**changes), sequence=1 << 39
        )
        answer = answers[0]
        if answer.type is MessageType.ERROR:
            self.state = answer.body["code"]
            return self.state
        self.epoch = answer.epoch
        if answer.worker != NOBODY:
            self.worker = self.rank = answer.worker
            self.incarnation = answer.incarnation
        self.state = answer.body["state"]
        return self.state

    def claim(self, *alive):
        """HELLO for a rank that another process has, until it is decided."""
        for _ in range(10):
            if self.hello() != "wait":
                break
            self.world.advance(0.5, *alive)
        return self.state

    def register(self, spec, values=None, **fields):
        body = {name: value for name, value in spec.to_body().items() if name in ("kind", "segments")}
        if values is None:
            values = torch.zeros(spec.numel, dtype=spec.dtype)
        return self.ask(MessageType.REGISTER, key=spec.key, body=body, payload=values, **fields)

    def seal(self, specs, **changes):
        body = {"chunks": len(specs), "fingerprint": layout_fingerprint(specs)} | changes
        return self.send(MessageType.SEAL, body=body)

    def initialise(self, specs, values=None):
        assert self.hello() == "initialise"
        for one in specs:
            self.register(one, None if values is None else values[one.key])
        self.seal(specs)
        self.take()

    def configure(self, key, numel, name="SGD", groups=None, runs=None):
        body = {"optimizer": name, "groups": groups or [SGD], "runs": runs or [[0, numel, 0]]}
        return self.ask(MessageType.CONFIGURE, key=key, body=body)

    def push(self, key, sequence, values, version=0, **fields):
        """PUSH; what came back to this worker at once."""
        return self.send(MessageType.PUSH, key=key, sequence=sequence, version=version, payload=values, **fields)

    def probe(self, key, sequence):
        return self.send(MessageType.PROBE, key=key, sequence=sequence, body={"round": 1})

    def repeat(self, key, sequence):
        """REPEAT; the answer again."""
        return self.send(MessageType.REPEAT, key=key, sequence=sequence, body={"round": 2})

    def pull(self, key, **body):
        return self.ask(MessageType.PULL, key=key, body=body)

    def heartbeat(self, **body):
        self.send(MessageType.HEARTBEAT, sequence=0, body=body)
        for answer in self.take(MessageType.HEARTBEAT_ACK):
            self.members = answer.body["members"]

    def updates(self):
        """Averages or weights that came: sequence -> values."""
        return {m.sequence: payload_tensor(m).clone() for m in self.take(MessageType.UPDATED)}


def team(world, size, specs, *, values=None, rule=AVERAGE, **options):
    """Workers 0 to size - 1, all in."""
    workers = [Worker(world, rank, rule=rule, world_size=size, **options) for rank in range(size)]
    workers[0].initialise(specs, values)
    for worker in workers[1:]:
        assert worker.hello() == "ready"
        worker.take()
    return workers


def hello_of(rank, nonce, *, incarnation=0, knows_members=False):
    """HELLO of a process; ``knows_members``: it says that it was live."""
    body = {"rank": rank, "nonce": nonce, "host": "h", "pid": nonce, "members": [rank] if knows_members else []}
    return Message(MessageType.HELLO, incarnation=incarnation, body=body)


def world_of(size, specs, **options):
    """A world, and its workers: see ``team``."""
    world = World()
    return world, team(world, size, specs, **options)


def push_all(workers, sequence, values, key=0):
    """All contribute the same to an exchange; their answers wait for them."""
    for worker in workers:
        worker.push(key, sequence, values)


def codes(messages):
    return [m.body["code"] for m in messages if m.type is MessageType.ERROR]


def rule_of(world, key=0, job="demo"):
    return world.shard.jobs.by_number[job_number(job)].chunks.rules[key]


__all__ = [
    "APPLY",
    "AVERAGE",
    "DTYPE_NUMBERS",
    "NO_KEY",
    "SGD",
    "WALL_S",
    "ErrorCode",
    "Worker",
    "World",
    "codes",
    "hello_of",
    "push_all",
    "rule_of",
    "spec",
    "team",
    "world_of",
]
