"""Independent workers, of which a coordinator says who takes part; each view of it has a new group.

view n     meet by the coordinator ── connect ── exchanges ... a death, a newcomer
view n+1                                              └─ leave the group at once ── meet ── connect ── ...
"""

from __future__ import annotations

import atexit
import logging
import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from psengine.collectives.base import Collective
from psengine.collectives.own_group import form_collective, unconnected
from psengine.collectives.solo import SoloCollective
from psengine.environment.context import DEFAULT_TIMEOUT, assign_worker
from psengine.environment.launchers import read_worker
from psengine.environment.local_sockets import host_of
from psengine.environment.processes import has_exited
from psengine.environment.variables import inherited_variables, read_variable
from psengine.errors import CollectiveError, ConfigurationError, ServerError, ServerRefusedError
from psengine.parameter_server.client import elastic
from psengine.parameter_server.client.addresses import keys_from_environment, parse_addresses
from psengine.parameter_server.client.connection import PROCESS
from psengine.parameter_server.client.elastic import ElasticClient, elastic_rule
from psengine.parameter_server.client.flow import Flow, run
from psengine.parameter_server.client.identity import DEFAULT_JOB, ending_with_the_job, taking_reservation
from psengine.parameter_server.client.join import greet
from psengine.parameter_server.client.options import SessionOptions
from psengine.protocol.messages import ErrorCode
from psengine.protocol.views import View
from psengine.strategies.elastic.guarded import GuardedCollective
from psengine.strategies.elastic.meeting import Meeting
from psengine.strategies.elastic.membership import Group, Member, Membership

logger = logging.getLogger(__name__)

# Members have just answered the coordinator: whoever does not come by then has died, or cannot reach the others.
FORM_S = 10.0


class CoordinatedMembership(Membership):
    """See the module's text.

    Args:
        virtual_workers: so many workers take part at most; others wait in ``enter`` for a place.

    Raises:
        ConfigurationError: PSENGINE_SERVERS is malformed.
    """

    def __init__(self, virtual_workers: int) -> None:
        self._virtual_workers = virtual_workers
        self._addresses = parse_addresses(None)
        self._job: ElasticClient | None = None
        self._collective: Collective = SoloCollective()
        self._view: View | None = None  # that it is of
        self._meeting: Meeting | None = None
        # Whose groups fail in which step, and since when.
        self._failing: object = None
        self._failed_s = 0.0

    @override
    def enter(self, facts: Mapping[str, str], checkpoint: int) -> Group:
        worker, workers = read_worker(inherited_variables())
        options = SessionOptions(
            addresses=self._addresses,
            job=read_variable("PSENGINE_JOB") or DEFAULT_JOB,
            rule=elastic_rule(self._virtual_workers, facts),
            rank=worker,
            world_size=workers or 1,
            keys=keys_from_environment(),
            uses_segments=False,
        )
        try:
            with ending_with_the_job():
                with taking_reservation(options) as taken:
                    self._job = ElasticClient(taken, PROCESS, checkpoint)
                    atexit.register(self.close)  # else others wait until torch has taken itself down
                    self._run(greet(self._job))
                if worker is None:
                    assign_worker(self._job.identity.worker)
                return self._next_group()
        except ServerRefusedError as error:
            if error.code == ErrorCode.RULE_MISMATCH:
                raise ConfigurationError(str(error)) from None
            raise

    @property
    @override
    def has_news(self) -> bool:
        return self._job is not None and self._view is not None and self._job.has_ended(self._view.number)

    @override
    def reached(self, completed: int) -> None:
        self._entered.completed = completed

    @override
    def regroup(self, completed: int | None, error: BaseException | None) -> Group:
        self._entered.completed = completed
        self._collective.abandon()
        if error is not None and self._view is not None:
            self._note_failure(self._view, error)
        return self._next_group(has_failed=error is not None)

    @override
    def leave(self, completed: int) -> bool:
        self._entered.completed = completed
        has_left: bool = self._run(elastic.leave(self._entered))
        if has_left:
            self.close()
        return has_left

    @override
    def close(self) -> None:
        if self._job is not None and self._job.parking.process_id == os.getpid():
            self._job.closing.set()
            self._job.transport.close()
            self._collective.abandon()
            if self._meeting is not None:
                self._meeting.end()

    @property
    def _entered(self) -> ElasticClient:
        assert self._job is not None, "it has entered"
        return self._job

    def _run(self, flow: Flow[Any]) -> Any:
        return run(flow, self._entered.closing)

    # ---- groups ------------------------------------------------------------------------------------------------

    def _next_group(self, *, has_failed: bool = False) -> Group:
        while True:
            former = 0 if self._view is None else self._view.number
            lost = self._lost() if has_failed else None
            self._view = view = self._run(elastic.regroup(self._entered, former, lost))
            try:
                collective = self._form(view)
            except (CollectiveError, RuntimeError, OSError) as error:
                has_failed = True
                self._note_failure(view, error)
                continue
            self._collective = collective = GuardedCollective(collective, lambda: self.has_news)
            states = zip(view.members, view.states, strict=True)
            members = tuple(Member(worker=m.rank, completed=s.completed, checkpoint=s.checkpoint) for m, s in states)
            return Group(members=members, collective=collective)

    def _lost(self) -> list[int]:
        """The members of the last view whose processes this worker sees are gone."""
        states = {} if self._view is None else dict(zip(self._view.members, self._view.states, strict=True))
        table = self._entered.runtime.process_table()
        here = {member.rank: one.pid for member, one in states.items() if table and one.processes == table}
        return [rank for rank, process_id in here.items() if has_exited(process_id)]

    def _note_failure(self, view: View, error: BaseException) -> None:
        """Raise ServerError where groups of the same members have failed for ``timeout_s`` without ending a step."""
        job, now_s = self._entered, time.monotonic()
        failing = job.completed, [(member.rank, member.incarnation) for member in view.members]
        is_first = failing != self._failing
        if is_first:
            self._failing, self._failed_s = failing, now_s
        level = logging.WARNING if is_first and not self.has_news else logging.INFO
        reason = str(error).partition("\n")[0]  # what follows is advice for jobs that end with it
        logger.log(level, "the workers of view %d could not go on together: %s", view.number, reason)
        failed_s = now_s - self._failed_s
        if failed_s >= job.options.timeout_s and not self.has_news:  # else another one may know more
            raise ServerError(
                f"{job} has been in no group of workers that ends a step for {failed_s:.0f} s (expected that it reaches"
                " all servers, and all workers each other; got:"
                f" {reason}{self._unconnected(view)}). Fix: start servers again that are gone; let firewalls pass"
                " connections between these hosts, to any port; name the interface between them in GLOO_SOCKET_IFNAME."
            ) from error

    def _unconnected(self, view: View) -> str:
        """Which members of a view are not connected to all others, for an error."""
        found = unconnected(self._store_of(view), self._name_of(view), len(view.members))
        places = [
            f"worker {view.members[rank].rank} on {view.states[rank].host}, which "
            + (f"listens at {address}" if address else "did not come")
            for rank, address in found.items()
        ]
        return f"; not connected to all others: {'; '.join(places)}" if places else ""

    def _name_of(self, view: View) -> str:
        """Of the view's group."""
        return f"{self._entered.identity.job}/{view.epoch}/{view.number}"

    def _store_of(self, view: View) -> Meeting:
        """Where its members meet."""
        return Meeting(self._entered, view.number, self._entered.runtime.now_s() + FORM_S)

    def _form(self, view: View) -> Collective:
        """A collective of the view's members.

        Raises:
            CollectiveError, RuntimeError, OSError: somebody did not come, or another view is to come before.
        """
        job, workers = self._entered, [member.rank for member in view.members]
        if len(workers) == 1:
            return SoloCollective()
        deadline_s = time.monotonic() + FORM_S
        self._meeting = meeting = self._store_of(view)
        collective = form_collective(
            meeting,
            self._name_of(view),
            workers.index(job.identity.worker),
            len(workers),
            DEFAULT_TIMEOUT.total_seconds(),
            lambda: self.has_news or time.monotonic() >= deadline_s,
            host=_own_address(host_of(job.control.address)),
        )
        if collective is None:
            until = "before another view is to come" if self.has_news else f"within {FORM_S:g} s"
            raise CollectiveError(f"workers {workers} did not all connect to each other {until}")
        return collective


def _own_address(host: str) -> str:
    """The address of this process on its way to ``host``; "" where gloo is told which interface to take."""
    if read_variable("GLOO_SOCKET_IFNAME"):
        return ""
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])
