"""The memory that workers of this host share with a shard, and that the shard lends them in turn.

worker ══ RESUME: its segment's descriptor ══► open it, by the kernel's word whose process that is
◄═ RESUMED: process, descriptor     ═══ where the job's answers are made
══ PUSH: a place in its segment     ══► the gradient is read there
◄═ UPDATED: a place in the shard's  ═══ the answer, until the chunk's next push, or the worker lets go
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field

from psengine.errors import ProtocolError
from psengine.parameter_server.segment import ALIGNMENT_BYTES, IS_AVAILABLE, Segment, aligned
from psengine.parameter_server.server.interfaces import Sender
from psengine.parameter_server.server.rules.answer_memory import Place
from psengine.parameter_server.server.shard.job import Job
from psengine.protocol.messages import Message

logger = logging.getLogger(__name__)

# Of each chunk, at most; where all are read, answers travel.
MAX_PLACES = 8


@dataclass(eq=False)
class _Reading:
    """A worker's step of a chunk: it may read the answer where it is made, from the answer to its next push."""

    step: int
    has_begun: bool = False


@dataclass
class _Worker:
    segment: Segment
    lent: Segment
    readings: dict[int, _Reading] = field(default_factory=dict)  # by chunk; of pushes whose gradient lay in ``segment``


class ShardSegments:
    """Of one shard; used in its thread."""

    def __init__(self) -> None:
        self._workers: dict[tuple[int, int, int], _Worker] = {}
        self._jobs: dict[int, Job] = {}  # that have memory lent

    def __len__(self) -> int:
        return len(self._workers)

    def attach(self, job: Job, resume: Message, sender: Sender) -> list[int] | None:
        """A member may share memory: where the shard's is, for RESUMED; None where payloads travel."""
        is_member = job.is_from_member(resume, sender)
        if not (IS_AVAILABLE and sender.process and is_member and "memory" in resume.body):
            return None
        try:
            segment = Segment.of_process(sender.process, resume.body["memory"])
            lent = next((one for rule in job.rules.values() if (one := rule.memory.segment)), None) or _lend(job)
        except (OSError, ValueError, ProtocolError) as error:
            logger.info("worker %d of job %r shares no memory with this server: %s", resume.worker, job.name, error)
            return None
        self._jobs[job.number] = job
        former = self._workers.get(_member(resume))
        worker = self._workers[_member(resume)] = _Worker(segment, lent)
        if former is not None:
            worker.readings = former.readings  # of the same process
        return [os.getpid(), lent.descriptor, lent.mark]

    def find(self, push: Message) -> None:
        """A PUSH came: give it its payload, if that lies in memory that its worker shares.

        Raises:
            ProtocolError: it does not.
        """
        worker = self._workers.get(_member(push))
        if worker is not None:
            reading = worker.readings.get(push.key)
            if reading is None or push.sequence > reading.step:
                worker.readings.pop(push.key, None)  # it has completed the step of its last push
                if push.place is not None:
                    worker.readings[push.key] = _Reading(push.sequence)
        if push.place is None or push.dtype is None:
            return
        if worker is None:
            raise ProtocolError(f"worker {push.worker} shares no memory with this shard")
        push.payload = worker.segment.tensor(push.place, push.numel, push.dtype)

    def put(self, answer: Message, place: Place | None) -> bool:
        """Tell a worker where an answer lies; whether it need not travel.

        ``place``: the payload's memory, where that does not change while it is read.
        """
        worker = self._workers.get(_member(answer))
        reading = None if worker is None else worker.readings.get(answer.key)
        if worker is None or reading is None or place is None or place.segment is not worker.lent:
            return False
        if reading.step != answer.sequence or reading.has_begun:
            return False  # it may be reading the answer to the same push, or to a later one
        reading.has_begun = True
        place.hold(reading)
        answer.place = place.offset
        return True

    def look(self) -> None:
        """Forget the workers that have let go of their memory, or died; call it often.

        A job without workers has no memory of this kind: each takes two descriptors.
        """
        self._workers = {member: worker for member, worker in self._workers.items() if worker.segment.is_held}
        for number in self._jobs.keys() - {number for number, _, _ in self._workers}:
            for rule in self._jobs.pop(number).rules.values():
                rule.take_back()


def _lend(job: Job) -> Segment:
    """Memory of this server where the job's answers are made from now on.

    Each chunk has as many places as there are parts, and neighbouring chunks are neighbours in each part.

    Raises:
        OSError: there is none.
    """
    places = {key: rule.lent_places() for key, rule in sorted(job.rules.items())}
    parts = min(MAX_PLACES, max(places.values(), default=0))
    rules = [job.rules[key] for key, number in places.items() if number]
    part_bytes = sum(aligned(rule.spec.size_bytes) for rule in rules)
    try:
        job.take_memory(max(0, parts - 1) * part_bytes, "answers that workers of this host read")
    except ProtocolError as error:
        logger.info("answers to workers of job %r travel: %s", job.name, error)
        parts, rules = 0, []
    segment = Segment.make("psengine-server", ALIGNMENT_BYTES + parts * part_bytes)
    segment.memory[:8] = os.urandom(8)  # so that nobody takes another memory for it
    begin = ALIGNMENT_BYTES
    for rule in rules:
        spec, begins = rule.spec, range(begin, begin + parts * part_bytes, part_bytes)
        rule.memory.lend([Place(segment.tensor(one, spec.numel, spec.dtype), segment, one) for one in begins])
        begin += aligned(spec.size_bytes)
    return segment


def _member(message: Message) -> tuple[int, int, int]:
    return message.job, message.worker, message.incarnation
