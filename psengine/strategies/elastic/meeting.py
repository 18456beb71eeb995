"""The store where members of a view form their group: torch's interface, over each member's control connection.

    set    ── MEET ──► the coordinator ── MEET ──► every member of the view, which keeps it until the next view
    get, wait, check                               what is here by now; nothing is sent

``set`` waits for no answer: round trips one after another would be most of the time in which a group forms.

gloo sets one key on each rank and reads that of every other, once (torch 2.13). The coordinator has no other port for
that, so who may read and write are the members, by their keys where servers have some.
"""

from __future__ import annotations

import threading
from typing import Any

import torch.distributed as dist

from psengine.errors import CollectiveError
from psengine.parameter_server.client.elastic import ElasticClient
from psengine.parameter_server.client.operation import Request

# It looks ten times a second whether its client is closed; one that connects to a peer is left behind.
END_S = 1.0


class Meeting(dist.Store):
    """See the module's text. torch calls the methods, also from C++.

    Args:
        job: of a member.
        view: the number of its view.
        deadline_s: when waits end, by the clock of ``job``; they end at once when another view is to come.

    Raises:
        CollectiveError: of all methods that wait: what they wait for did not come.
        ServerError: of these too: the coordinator has not taken a key that was set before.
    """

    def __init__(self, job: ElasticClient, view: int, deadline_s: float) -> None:
        super().__init__()
        self._job, self._view, self._deadline_s = job, view, deadline_s
        self._user: threading.Thread | None = None
        self._said: list[Request] = []

    def set(self, key: str, value: Any) -> None:
        """Have all members know ``value``, bytes; a key is set once."""
        self._said.append(self._job.meet(self._view, key, value))

    def get(self, key: str) -> bytes:
        """The value of a key; waits until it is set."""
        job, self._user = self._job, threading.current_thread()
        while (found := job.parking.look(lambda: job.met.get(key))) is None:
            if refusals := [request.error for request in self._said if request.error is not None]:
                raise refusals[0]
            is_late = job.runtime.now_s() >= self._deadline_s
            if is_late or job.has_ended(self._view):
                why = "until the deadline" if is_late else "before another view is to come"
                raise CollectiveError(f"{key!r} was not there {why}")
        return found

    def wait(self, keys: list[str], timeout: Any = None) -> None:
        """Wait until all keys are set, not ``timeout``."""
        for key in keys:
            self.get(key)

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are set, as far as this member has heard."""
        return all(key in self._job.met for key in keys)

    def end(self) -> None:
        """Wait for the thread that uses this; the client is closed.

        A thread that comes from C++ to Python while the interpreter ends aborts the process.
        """
        if self._user is not None:
            self._user.join(END_S)
