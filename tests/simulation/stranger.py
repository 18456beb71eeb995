"""Who lacks a job's key, knows who takes part, and says anything. Nothing of it may count.

It does not show a view that it has signed, nor register a job that servers do not know: the first to do so is believed.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch

from psengine.protocol.frames import encode
from psengine.protocol.messages import Message, MessageType
from psengine.protocol.views import Release, View, ViewMember, message_of
from simulation import inspection
from simulation.network import copied
from simulation.violation import require

MESSAGES = 24
LARGEST_CLAIM = 2**30 - 2**20


class Stranger:
    """See the module's text; it speaks ``MESSAGES`` times within ``lasts_s``."""

    def __init__(self, world, lasts_s: float, seed: str) -> None:
        self._world = world
        self._rng = rng = random.Random(f"stranger {world.scenario.seed} {seed}")
        self._key = rng.randbytes(32)
        for _ in range(MESSAGES):
            world.clock.after(lasts_s * rng.random(), self._speak)

    def _speak(self) -> None:
        rng, world = self._rng, self._world
        training = rng.choice(world.trainings)
        server = rng.choice((training.lead, rng.choice(world.network.servers)))
        if not server.is_up or server.is_paused or not server.threads or world.leaders[server.index] is not server:
            return
        members = [(rank, incarnation) for rank, (incarnation, _) in training.views.members.items()]
        rank, incarnation = rng.choice([*members, (rng.randrange(6), int(1.7e12) + rng.randrange(10_000))])
        who = {"job": training.number, "worker": rank, "incarnation": incarnation + rng.choice((0, 0, 1, 2**60))}
        is_to_lead = server is training.lead and training.scenario.rule == "elastic"
        if is_to_lead or (server is training.lead and rng.random() < 0.5):
            self._tell_coordinator(training, server, who)
        elif training.scenario.rule != "elastic":
            self._tell_shard(training, server, who)

    def _say(self, server, number: int, messages: list[Message], state: Callable[[], Any]) -> None:
        route, before = f"stranger {self._rng.getrandbits(32)}".encode(), state()
        for message in messages:
            message.sequence = message.sequence or 1 + self._rng.getrandbits(62)
            server.threads[number].take(route, copied(encode(message)))
            require(state() == before, "a stranger's {} {} counts", message.type.name, message.body)

    # ---- coordinators ------------------------------------------------------------------------------------------

    def _tell_coordinator(self, training, server, who: dict[str, Any]) -> None:
        rng, job = self._rng, server.coordinators.by_number.get(training.number)
        numbers = {"view": rng.choice((1, LARGEST_CLAIM)), "completed": rng.choice((0, 2**40))}
        view = self._view(numbers["view"], who, (server.epoch,))
        rule = training.job.rule if job is None or job.rule is None else job.rule
        hello = {
            "job": training.name, "run": "a stranger's", "nonce": rng.getrandbits(64), "host": "elsewhere", "pid": 1,
            "rank": who["worker"], "world_size": 1, "rule": rule,
            "key": self._key, "digest": view.body["digest"], "release": 2**60, **numbers,
        }  # fmt: skip
        life = {"shard": 0, "epoch": 2**62, "chunks": 0, "version": 0, "view": LARGEST_CLAIM}
        commits: list[dict[str, Any]] = [
            {"what": "life", **life},
            {"what": "join"},
            {"what": "step", "step": 2**40, "abstained": False, "completed": 2**40},
            {"what": "prepared", "view": numbers["view"], "completed": 2**40},
        ]
        commit = Message(MessageType.COMMIT, view=LARGEST_CLAIM, body=rng.choice(commits), **who)
        leave = Message(MessageType.LEAVE, body={"completed": 0}, **who)
        beat = Message(MessageType.HEARTBEAT, view=LARGEST_CLAIM, body={"completed": 2**40, "blocked": True}, **who)
        view.body["digest"] = rng.randbytes(16)
        greeting = [Message(MessageType.HELLO, body=hello, **who), view] if rule else [beat]
        said = rng.choice((greeting, [commit], [leave], [beat]))

        def state() -> Any:
            found = server.coordinators.by_number.get(training.number)
            if found is None or found is not job:
                return None
            return found.to_meta(), None if found.view is None else found.status(0.0).lost

        self._say(server, 0, said, state)

    def _view(self, number: int, who: dict[str, Any], shards: tuple[int, ...]) -> Message:
        members = self._rng.choice(((), (ViewMember(who["worker"], who["incarnation"], "", 1),)))
        message = message_of(View(number, 2**62, members, shards), self._key, who["job"])
        message.view, message.worker, message.incarnation = number, who["worker"], who["incarnation"]
        return message

    # ---- shards ------------------------------------------------------------------------------------------------

    def _tell_shard(self, training, server, who: dict[str, Any]) -> None:
        rng = self._rng
        number = rng.randrange(len(server.threads))
        shard = server.threads[number].shard
        if not inspection.view_number(shard, training.number)[1]:
            return  # who registers first is believed
        is_trained = inspection.is_trained(shard, training.number)
        place = rng.choice(([0, 0, rng.choice((1, 2))], inspection.place(shard, training.number)))
        resume = {
            "job": training.name, "rule": training.job.rule, "registration": 2**62 if is_trained else 1,
            "key": self._key, "place": place,
        }  # fmt: skip
        if rng.random() < 0.5:
            resume["open"] = [[0, 1]]
        release = message_of(Release(2**60, 2**40), self._key, training.number)
        release.view = inspection.view_number(shard, training.number)[1]
        values = torch.ones(5, dtype=torch.float64)
        spec = rng.choice(training.job.specs)
        body = {name: value for name, value in spec.to_body().items() if name not in ("key", "dtype")}
        register = Message(MessageType.REGISTER, key=spec.key, body=body, **who)
        register.dtype, register.numel = spec.dtype, spec.numel
        step = rng.choice((1, 2, 3, 2**40))
        said = [
            self._view(rng.choice((2, LARGEST_CLAIM)), who, (server.epoch,)),
            release,
            Message(MessageType.RESUME, body=resume, **who),
            Message(MessageType.PUSH, key=spec.key, sequence=step, payload=values, view=release.view, **who),
            Message(MessageType.RESULT, key=spec.key, sequence=step, payload=values, view=release.view, **who),
            Message(MessageType.STORE, key=spec.key, payload=values, **who),
            register,
            Message(MessageType.PULL, key=spec.key, **who),
        ]
        # Where somebody is connected, nobody else registers anything.
        is_alone = is_trained and not inspection.is_at_work(shard, training.number)
        self._say(server, number, [said[2], said[0]] if is_alone else [rng.choice(said)], lambda: shard.changes)
