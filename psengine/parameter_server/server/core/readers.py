"""Answers to those who look on: evaluators, dashboards, ``psengine status``. They change nothing. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from psengine.errors import ProtocolError
from psengine.parameter_server.server.core.answers import Answers, traffic_bytes
from psengine.parameter_server.server.core.job import Job
from psengine.parameter_server.server.core.status_report import StatusReport
from psengine.protocol.frames import payload_tensor
from psengine.protocol.messages import ErrorCode, Message, MessageType


class Readers:
    """See the module's text.

    Args:
        jobs: of the shard, by number.
        answers: of the shard.
        report: of the shard.
    """

    def __init__(
        self,
        jobs: Mapping[int, Job],
        answers: Answers,
        report: StatusReport,
    ) -> None:
        self._jobs = jobs
        self._reply = reply = answers.message
        self._of_the_server: dict[MessageType, Callable[[Message], Message]] = {
            MessageType.STATUS: lambda message: reply(MessageType.STATUS_REPORT, message, payload=report.payload()),
            MessageType.BYE: lambda message: reply(MessageType.OK, message),
            MessageType.ECHO: lambda message: reply(MessageType.ECHOED, message, payload=payload_tensor(message)),
        }
        self._of_a_job: dict[MessageType, Callable[[Job, Message], Message]] = {
            MessageType.HEARTBEAT: lambda job, message: reply(
                MessageType.HEARTBEAT_ACK, message, body=answers.heartbeat_body(job, message)
            ),
            MessageType.LIST: lambda job, message: reply(
                MessageType.CHUNKS, message, body=job.chunks.page(message.body["after"])
            ),
            MessageType.PULL: self._pull,
        }

    def answer(self, message: Message) -> Message:
        """What a reader is told, whose message passed the gate.

        Raises:
            ProtocolError: the job has no values, or its servers do not hold them.
        """
        if message.type in self._of_the_server:
            return self._of_the_server[message.type](message)
        job = self._jobs.get(message.job)
        if job is None or not job.is_sealed:
            sealed = sorted(known.name for known in self._jobs.values() if known.is_sealed)
            raise ProtocolError(
                f"there are no values of the job yet (jobs with values here: {sealed or 'none'}). Name another"
                " (job=, PSENGINE_JOB), or wait for its first worker.",
                ErrorCode.NOT_READY,
            )
        return self._of_a_job[message.type](job, message)

    def _pull(self, job: Job, message: Message) -> Message:
        job.weights.check_readable()
        type, version, payload, body = job.chunks.read(message)
        answer = self._reply(type, message, version=version, payload=payload, body=body)
        job.statistics.bytes_out += traffic_bytes(answer)
        return answer
