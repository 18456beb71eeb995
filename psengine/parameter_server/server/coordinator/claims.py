"""Checks the view that a process claims in its HELLO to be in. Pure.

    HELLO(view, digest, key) ─► judge ─┬─ the coordinator knows that view ──────────► the process is in it, or is not
                                       └─ VIEW_WANTED ─► VIEW, RELEASE… ─► hear ─► HELLO again ─┘

HELLO has only the number and digest of a view, so that its size does not grow with the job. A coordinator that lacks
the view, because it has restarted, asks one process for it. No claim counts before the process proves the job's key.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from psengine.errors import ProtocolError
from psengine.parameter_server.server.coordinator.states import JobMemory, JobState
from psengine.parameter_server.server.interfaces import Sender, ShardSettings
from psengine.protocol.bounds import MAX_VIEW_NUMBER
from psengine.protocol.messages import ErrorCode, Message, MessageType
from psengine.protocol.views import Release, View, check_digest, release_of, sign, view_of
from psengine.status_port.overview import owns_weights

# The messages with which a process shows its view when it is asked to.
SHOWN = frozenset({MessageType.VIEW, MessageType.RELEASE})


@dataclass
class Shown:
    """The view that one process, ``sender``, was asked to show, and the new releases under it.

    Attributes:
        since_s: when it was asked.
        key, rule: of its HELLO.
    """

    sender: Sender
    since_s: float
    key: bytes
    rule: dict[str, Any]
    view: View | None = None
    releases: tuple[Release, ...] = ()
    takes_releases: bool = False  # those that follow the view are news too


class Claims:
    """See the module's text."""

    def __init__(self, job: JobMemory, settings: ShardSettings, is_connected: Callable[[bytes], bool]) -> None:
        self._job = job
        self._settings = settings
        self._is_connected = is_connected
        self._shown: Shown | None = None

    def judge(self, message: Message, sender: Sender, now_s: float) -> tuple[Message, View | None]:
        """Return the HELLO without claims that do not count, and the view that the process is in; None without the key.

        Raises:
            ProtocolError: the process is of another life of the job, or has to show its view first.
        """
        body, has_key = message.body, message.body.get("key") == self._job.key
        if "view" not in body:
            return message if has_key or not self._job.is_known else replace(message, incarnation=0), None
        if not has_key and (self._job.is_known or owns_weights(body["rule"])):
            self._refuse_other_life(body["rule"])
        shown = self._shown
        if shown is None or shown.sender.route != sender.route:
            if self._lacks(message):
                self._ask_to_show(message, sender, now_s)
            view = self._job.view
        else:  # it has shown what it has
            view, self._shown = shown.view, None
            if not self._job.is_known:
                self._refuse_other_life(body["rule"])
        is_in = view is not None and view.number == body["view"] and _has_sender(view, message, sender)
        return message, view if is_in else None

    def _refuse_other_life(self, rule: Mapping[str, Any]) -> None:
        if not owns_weights(rule):
            raise ProtocolError(
                f"job {self._job.name!r} began anew while this worker was away, and its state is of the job's former"
                " life. Start it again: it then takes over the others' state.",
                ErrorCode.FENCED,
            )
        raise ProtocolError(
            f"job {self._job.name!r} is lost: its lead server has restarted without its weights (durability"
            f" {self._settings.durability}). Start all anew, from a checkpoint if there is one.",
            ErrorCode.STATE_LOST,
        )

    def _lacks(self, message: Message) -> bool:
        """Whether a process has a view, or a release under it, that this coordinator needs."""
        job, body = self._job, message.body
        if not job.is_known or job.view is None or body["view"] > job.view.number:
            return True
        known = max((one.number for one in job.releases), default=0)
        if body["view"] < job.view.number:
            return False
        has_other = body["digest"] != sign(job.key, message.job, job.view)  # of another coordinator's
        return has_other or (job.state is JobState.RESUMING and body.get("release", 0) > known)

    def _ask_to_show(self, message: Message, sender: Sender, now_s: float) -> None:
        """Ask one process at a time: all of a job come at once after a restart, and each view names all of them."""
        body, shown = message.body, self._shown
        if not self._job.is_known and body["view"] > MAX_VIEW_NUMBER // 2:
            raise ProtocolError(f"view {body['view']} of an unknown job leaves no room for others", ErrorCode.BAD_VALUE)
        is_awaited = shown is not None and self._is_connected(shown.sender.route)
        if shown is not None and is_awaited and now_s < shown.since_s + self._settings.heartbeat_s:
            text = f"another worker of job {self._job.name!r} shows its view; ask again"
            raise ProtocolError(text, ErrorCode.NOT_READY)
        self._shown = Shown(sender, now_s, body["key"], body["rule"])
        raise ProtocolError("this coordinator lacks the view; show it, and say HELLO again", ErrorCode.VIEW_WANTED)

    def has_asked(self, route: bytes) -> bool:
        """Whether the process with this connection was asked to show its view and the releases under it."""
        return self._shown is not None and self._shown.sender.route == route

    def hear(self, message: Message) -> Shown:
        """Take a former coordinator's VIEW, or a RELEASE under it; the result's ``releases`` are this message's."""
        shown, job = self._shown, self._job
        assert shown is not None, "see has_asked"
        if message.type is MessageType.RELEASE:
            release = release_of(message.body)
            check_digest(message, shown.key, release)
            shown.releases = (release,) if shown.takes_releases else ()
            return shown
        view = view_of(message.body)
        check_digest(message, shown.key, view)
        if not _has_sender(view, message, shown.sender):
            raise ProtocolError(f"worker {message.worker} is not in the view that it shows")
        number = 0 if job.view is None else job.view.number
        # What still stands of an older view's decisions is in the newer view.
        shown.takes_releases = view.number > number or (job.state is JobState.RESUMING and view.number == number)
        shown.view, shown.releases = view, view.releases if shown.takes_releases else ()
        return shown


def _has_sender(view: View, message: Message, sender: Sender) -> bool:
    """Whether the sender of ``message`` is in the view."""
    member = view.member(message.worker)
    return member is not None and (member.incarnation, member.user_id) == (message.incarnation, sender.user_id)
