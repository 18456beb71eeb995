"""The oracle of leases: a worker is out once it was silent for its lease, not before, and not much later.

Time that a server stood still is nobody's silence, from a pause on that is longer than a heartbeat.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from psengine.parameter_server.server.interfaces import Outgoing
from psengine.parameter_server.server.core.shard import Shard
from psengine.protocol.messages import Message, MessageType
from simulation.violation import require

if TYPE_CHECKING:
    from simulation.scenario import Scenario
    from simulation.server import ServerProcess, ServerWitness

# Leases are looked at in ticks, and a pause is known to about one.
SLACK_S = 0.6


@dataclass(slots=True)
class _Known:
    """A member, and when it was heard last."""

    member: Any
    heard_s: float


class Leases:
    """A ``ServerWitness``: the oracle of the job, and this one."""

    def __init__(self, witness: ServerWitness, scenario: Scenario) -> None:
        self._witness, self._scenario = witness, scenario
        # By (life of a server, shard).
        self._known: dict[tuple[int, int], dict[int, _Known]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._witness, name)

    def after(self, server: ServerProcess, shard: Shard, message: Message | None, outgoing: list[Outgoing]) -> None:
        """See ``ServerWitness``."""
        self._witness.after(server, shard, message, outgoing)
        known = self._known.setdefault((server.epoch, shard.index), {})
        now_s = server.clock.now_s
        for job in shard.jobs.by_number.values():
            if job.outdated:
                continue  # nobody is listened to
            if message is None:
                self._check(server, known, job.membership.members, outgoing)
            elif (one := known.get(message.worker)) is not None:
                is_current = message.epoch in (0, server.epoch) and not one.member.is_expected
                if is_current and one.member.incarnation == message.incarnation:
                    one.heard_s = now_s
            for rank, member in job.membership.members.items():
                if rank not in known or known[rank].member is not member:
                    known[rank] = _Known(member, now_s)
            for rank in known.keys() - job.membership.members.keys():
                del known[rank]

    def _check(
        self, server: ServerProcess, known: dict[int, _Known], members: dict[int, Any], outgoing: list[Outgoing]
    ) -> None:
        lease_s = self._scenario.lease_s
        told = {one.message.worker for one in outgoing if one.message.type is MessageType.ERROR}
        for rank, one in known.items():
            least_s, most_s = self._silent_s(server, one.heard_s)
            if rank in members:
                is_late = least_s > lease_s + SLACK_S
                require(not is_late, "worker {} was silent for {} s, and is not out", rank, least_s)
            elif rank not in told:  # else it is out for another reason
                is_early = most_s < lease_s - SLACK_S
                require(not is_early, "worker {} was silent for {} s, and is out", rank, most_s)

    def _silent_s(self, server: ServerProcess, heard_s: float) -> tuple[float, float]:
        """How long a worker that was heard then has been silent, at least and at most."""
        now_s, longest_s = server.clock.now_s, max(self._scenario.heartbeat_s, 0.2)
        least_s = most_s = now_s - heard_s
        for began_s, ended_s in server.pauses:
            if ended_s > heard_s:
                pause_s = ended_s - max(began_s, heard_s)
                least_s -= pause_s if ended_s - began_s > longest_s - SLACK_S else 0.0
                most_s -= pause_s if ended_s - began_s > longest_s + SLACK_S else 0.0
        return least_s, most_s
