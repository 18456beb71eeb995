"""Whether a server can be reached at all: libzmq retries without a word."""

from __future__ import annotations

import logging
import socket
import threading

from psengine.parameter_server.client.channel import Channel

logger = logging.getLogger(__name__)

# A server that is started together with its workers listens by then.
SILENCE_S = 3.0
CONNECT_S = 3.0


def watch_first_contact(channel: Channel, closing: threading.Event, wait_s: float) -> None:
    """Report, in the log and in the channel's errors, a name that does not resolve or an address without a listener.

    Resolving and connecting may take long and have a thread of their own, which nobody waits for.

    Args:
        channel: to an address as ``addresses.parse_addresses`` returns it; ipc:// is not checked.
        closing: set when the session ends.
        wait_s: how long the client waits for its first answer.
    """
    if not channel.address.startswith("tcp://"):
        return
    host, _, port = channel.address.removeprefix("tcp://").rpartition(":")
    address = host.strip("[]"), int(port)

    def look() -> None:
        try:
            socket.getaddrinfo(*address, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError) as error:
            reason = f"the host name {host!r} does not resolve here ({getattr(error, 'strerror', None) or error})"
            _say(channel, reason, "or add the name to DNS or /etc/hosts", wait_s)
            return
        if closing.wait(SILENCE_S) or channel.last_heard_s is not None:
            return
        try:
            socket.create_connection(address, CONNECT_S).close()
        except OSError as error:
            if channel.last_heard_s is None and not closing.is_set():
                reason = f"nobody can be reached there ({error.strerror or error})"
                _say(channel, reason, "or start psengine-server there", wait_s)

    threading.Thread(target=look, name="psengine-reachability", daemon=True).start()


def _say(channel: Channel, reason: str, other_fix: str, wait_s: float) -> None:
    channel.last_problem = reason
    logger.warning(
        "the server %s cannot be reached: %s. Correct the address (PSENGINE_SERVERS, or servers=), %s; it is tried"
        " again for %g s in all.",
        channel.address,
        reason,
        other_fix,
        wait_s,
    )
