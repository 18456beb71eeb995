"""Shards without sockets, and workers that speak to them by hand: messages go through the codec, views are the test's.

world = World()                     one shard; World(shards=2) two, which have every chunk
workers = team(world, 3, [spec()])  a job, registered; three workers in view 1
workers[0].push(0, 1, values)       its answers: workers[0].updates()
world.publish(workers[:2], from_step=2)
"""

import itertools
import json

import torch

from psengine.parameter_server.server.interfaces import Sender, ShardSettings
from psengine.parameter_server.server.shard.shard import Shard
from psengine.protocol.frames import decode, encode, payload_tensor
from psengine.protocol.layout import ChunkKind, ChunkSpec, Segment, TableSpec, job_number
from psengine.protocol.messages import NOBODY, Message, MessageType
from psengine.protocol.rows import pack_rows
from psengine.protocol.views import Release, View, ViewMember, message_of

AVERAGE = {"name": "average"}
APPLY = {"name": "apply", "max_staleness": None, "staleness_scaling": None, "delay_compensation": 0.0}
MERGE = {"name": "merge", "quorum": 2, "grace": 0.0}
SGD = {"lr": 0.1, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False, "maximize": False}
KEY = bytes(range(32))
COORDINATOR_EPOCH = 1000


def spec(key=0, numel=4, dtype=torch.float32, kind=ChunkKind.PARAMETER, name=None):
    return ChunkSpec(key, kind, dtype, numel, (Segment(name or f"p{key}", (numel,), (1,), 0, numel),))


def table(key=0, dim=4, *, name="users", rows=1000, part=0, parts=1, optimizer="sgd", max_rows=0, std=1.0):
    """A part of a table."""
    of = TableSpec(name, rows, dim, part, parts, 3, std, optimizer, 1e-10, max_rows, -1)
    return ChunkSpec(key, ChunkKind.TABLE, torch.float32, dim, (), of)


class World:
    """Shards, which views name, and what left them. ``sent`` has it by route; ``events`` what people were told."""

    def __init__(self, *, epoch=7, shards=1, **settings):
        self.settings = ShardSettings(**settings)
        self.sent = {}
        self.events = []
        self.broken = set()  # routes whose connection does not stand
        self.shards = [None] * shards
        for index in range(shards):
            self.start(epoch + index, index=index)
        self.views = {}  # by job, the newest
        self.releases = {}  # by job, how many

    @property
    def shard(self):
        return self.shards[0]

    def start(self, epoch, states=None, index=0):
        """The server process of a shard starts (again)."""
        shard = Shard(index, epoch, self.settings, self._note, lambda route: bool(route) and route not in self.broken)
        if states is not None:
            shard.restore(states)
        self.shards[index] = shard
        return shard

    def _note(self, kind, text, *, job="", worker=None):
        self.events.append((kind, job, worker, text))

    def deliver(self, route, message, user_id="", shard=0, *, codec=True):
        """A message comes to a shard; what left, as (route, message)."""
        if codec:
            message = decode([bytes(frame) for frame in encode(message)])
        posted = []
        for one in self.shards[shard].apply(message, Sender(route, user_id)):
            answer = one.message
            if answer.type is MessageType.RESUMED:
                answer.body["shards"] = ["tcp://127.0.0.1:1"]  # the shard's thread knows them
            answer = decode([bytes(frame) for frame in encode(answer)])
            if one.route not in self.broken:
                self.sent.setdefault(one.route, []).append(answer)
            posted.append((one.route, answer))
        return posted

    # ---- in the coordinator's place ------------------------------------------------------------------------------

    def publish(self, workers, *, forwarded_by=None, **fields):
        """The next view, which these workers are in, forwarded by each of them to each shard."""
        job = (workers or forwarded_by)[0].job
        former = self.views.get(job)
        fields.setdefault("number", 1 if former is None else former.number + 1)
        fields.setdefault("epoch", COORDINATOR_EPOCH)
        fields.setdefault("shards", tuple(shard.epoch for shard in self.shards))
        members = tuple(
            ViewMember(one.rank, one.incarnation, one.user_id, first_step=1)
            for one in sorted(workers, key=lambda one: one.rank)
        )
        view = self.views[job] = View(members=members, **fields)
        for worker in workers:
            worker.view = view.number
        for worker in forwarded_by or workers:
            worker.forward(view)
        return view

    def release(self, workers, step, *, contributors=None):
        """The next decision of the job of these workers, forwarded by each of them."""
        job = workers[0].job
        self.releases[job] = self.releases.get(job, 0) + 1
        release = Release(self.releases[job], step, contributors)
        for worker in workers:
            worker.forward(release)


class Worker:
    """A client of the shards of a world; ``rank`` None: a reader."""

    def __init__(self, world, rank=None, *, job="demo", rule=AVERAGE, user_id="", incarnation=None):
        self.world, self.rank, self.job, self.rule, self.user_id = world, rank, job, rule, user_id
        self.incarnation = (0 if rank is None else 50 + rank) if incarnation is None else incarnation
        self.worker = NOBODY if rank is None else rank
        self.view = 0
        self._connections = itertools.count(1)
        self._ids = itertools.count(1 << 40)
        self.connect()

    def connect(self):
        """Another connection; the former is broken."""
        if hasattr(self, "route"):
            self.world.broken.add(self.route)
        self.route = f"{self.job}-{self.rank}-{self.incarnation}-{next(self._connections)}".encode()

    @property
    def inbox(self):
        return self.world.sent.setdefault(self.route, [])

    def take(self, *types):
        """Remove and return what came (of these types)."""
        taken = [m for m in self.inbox if not types or m.type in types]
        self.inbox[:] = [m for m in self.inbox if types and m.type not in types]
        return taken

    def send(self, kind, *, shard=0, codec=True, **fields):
        """A message to a shard; what came back to this worker at once."""
        fields = {"worker": self.worker, "incarnation": self.incarnation, "view": self.view} | fields
        fields.setdefault("job", job_number(self.job))
        if "sequence" not in fields:
            fields["sequence"] = next(self._ids)
        payload = fields.get("payload")
        if payload is not None:
            fields["dtype"], fields["numel"] = payload.dtype, payload.numel()
        answers = self.world.deliver(self.route, Message(kind, **fields), self.user_id, shard, codec=codec)
        return [message for route, message in answers if route == self.route]

    def ask(self, kind, **fields):
        """Send; the one answer."""
        answers = self.send(kind, **fields)
        assert len(answers) == 1, answers
        self.inbox.remove(answers[0])
        return answers[0]

    def forward(self, value):
        """VIEW or RELEASE, to each shard; what came back to this worker."""
        message = message_of(value, KEY, job_number(self.job))
        fields = {"worker": self.worker, "incarnation": self.incarnation, "view": self.view, "body": message.body}
        shards = range(len(self.world.shards))
        return [one for shard in shards for one in self.send(message.type, shard=shard, **fields)]

    def resume(self, pushes=(), *, shard=0, **fields):
        """RESUME of a member; RESUMED's body, or the code of the ERROR."""
        body = {"job": self.job, "rule": self.rule, "registration": 0, "key": KEY, "place": [shard, 0, 1]}
        body |= {"open": [list(push) for push in pushes]}
        return self._resume({} if self.worker == NOBODY else body, shard, **fields)

    def begin(self, registration=1, *, key=KEY, shard=0, **fields):
        """RESUME of a registrar."""
        body = {"job": self.job, "rule": self.rule, "registration": registration, "key": key, "place": [shard, 0, 1]}
        return self._resume(body, shard, **fields)

    def _resume(self, body, shard, **fields):
        answer = self.send(MessageType.RESUME, body=body, shard=shard, **fields)[0]
        return answer.body["code"] if answer.type is MessageType.ERROR else answer.body

    def register(self, spec, values=None, **fields):
        body = {name: value for name, value in spec.to_body().items() if name in ("kind", "segments", "table")}
        if values is None and spec.table is None:
            values = torch.zeros(spec.numel, dtype=spec.dtype)
        if values is None:
            fields |= {"dtype": spec.dtype, "numel": spec.numel}
        return self.ask(MessageType.REGISTER, key=spec.key, body=body, payload=values, **fields)

    def configure(self, key, numel, name="SGD", groups=None, runs=None, **fields):
        body = {"optimizer": name, "groups": groups or [SGD], "runs": runs or [[0, numel, 0]]}
        return self.ask(MessageType.CONFIGURE, key=key, body=body, **fields)

    def push(self, key, step, values, version=0, **fields):
        """PUSH; what came back to this worker at once."""
        return self.send(MessageType.PUSH, key=key, sequence=step, version=version, payload=values, **fields)

    def push_rows(self, key, step, ids, rows, lr=0.5, divisor=1, **body):
        """PUSH of rows of a table; what came back to this worker at once."""
        body = {"rows": len(ids), "lr": lr, "divisor": divisor, **body}
        payload = pack_rows(torch.as_tensor(ids, dtype=torch.int64), rows)
        return self.send(MessageType.PUSH, key=key, sequence=step, version=0, payload=payload, body=body)

    def store_rows(self, key, ids, rows):
        payload = pack_rows(torch.as_tensor(ids, dtype=torch.int64), rows)
        return self.ask(MessageType.STORE, key=key, payload=payload, body={"rows": len(ids)})

    def pull_rows(self, key, ids, **fields):
        """The rows of these ids; or the ERROR."""
        ids = torch.as_tensor(ids, dtype=torch.int64)
        answer = self.ask(MessageType.PULL, key=key, payload=ids, **fields)
        return answer if answer.type is MessageType.ERROR else payload_tensor(answer).view(len(ids), -1).clone()

    def pull(self, key, *, shard=0, **body):
        return self.ask(MessageType.PULL, key=key, body=body, shard=shard)

    def updates(self):
        """Averages or weights that came: step -> values."""
        return {m.sequence: payload_tensor(m).clone() for m in self.take(MessageType.UPDATED)}


def team(world, size, specs, *, values=None, rule=AVERAGE, job="demo", optimizer=None, **fields):
    """Workers 0 to size - 1 of a job that the first has registered, in its first view."""
    workers = [Worker(world, rank, rule=rule, job=job) for rank in range(size)]
    for shard in range(len(world.shards)):
        workers[0].begin(shard=shard)
        for one in specs:
            workers[0].register(one, None if values is None else values[one.key], shard=shard)
            if rule["name"] != "average" and one.kind is ChunkKind.PARAMETER:
                workers[0].configure(one.key, one.numel, shard=shard, **(optimizer or {}))
    world.publish(workers, world_size=size, **fields)
    for worker in workers:
        worker.resume()
        worker.take()
    return workers


def world_of(size, specs, **options):
    """A world, and its workers: see ``team``."""
    world = World()
    return world, team(world, size, specs, **options)


def push_all(workers, step, values, key=0):
    """All contribute the same to a step; their answers wait for them."""
    for worker in workers:
        worker.push(key, step, values)


def codes(messages):
    return [m.body["code"] for m in messages if m.type is MessageType.ERROR]


def whole(world):
    """All that a shard would keep, and the sizes of what it has."""
    chunks = [chunk for job in world.shard.capture() for chunk in job.chunks]
    kept = [(chunk.meta, {name: tensor.tolist() for name, tensor in chunk.tensors.items()}) for chunk in chunks]
    return [kept, world.shard.memory_bytes()]


def rule_of(world, key=0, job="demo", shard=0):
    return world.shards[shard].jobs[job_number(job)].rules[key]


def assert_same_states(found, expected):
    """Jobs of shards as snapshots have them: equal to the bit."""

    def described(jobs):
        return [(job.name, job.meta, [(one.key, one.meta, list(one.tensors)) for one in job.chunks]) for job in jobs]

    for jobs, others in zip(found, expected, strict=True):
        assert json.dumps(described(jobs)) == json.dumps(described(others))
        chunks, twins = ([one for job in some for one in job.chunks] for some in (jobs, others))
        for chunk, twin in zip(chunks, twins, strict=True):
            for name, tensor in chunk.tensors.items():
                wanted = twin.tensors[name]
                assert (tensor.dtype, tensor.shape) == (wanted.dtype, wanted.shape)
                assert torch.equal(bits(tensor), bits(wanted)), (chunk.key, name)


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
