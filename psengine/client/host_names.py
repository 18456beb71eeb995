"""Does a server's host have an address? libzmq asks again and again, and says nothing."""

from __future__ import annotations

import ipaddress
import logging
import threading
from collections.abc import Callable

from psengine.rendezvous import resolve

logger = logging.getLogger(__name__)


def look_up(address: str, unresolved: Callable[[str], None]) -> None:
    """Say in the log, and to ``unresolved``, that a server's host name does not resolve; from a thread of its own.

    Resolvers may take long, so nobody waits for the thread. Numeric addresses and ipc:// need none.

    Args:
        address: as ``addresses.parse_addresses`` returns it.
        unresolved: called with the reason, from that thread.
    """
    if not address.startswith("tcp://"):
        return
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    try:
        ipaddress.ip_address(host.strip("[]"))
        return
    except ValueError:
        pass

    def ask() -> None:
        try:
            resolve(host, int(port))
        except (OSError, UnicodeError) as error:
            reason = f"the host name {host!r} does not resolve here ({getattr(error, 'strerror', None) or error})"
            unresolved(reason)
            logger.warning(
                "the server %s cannot be reached: %s. Correct the address (PSENGINE_SERVERS, or servers=), or add the"
                " name to DNS or /etc/hosts; until then it is tried again.",
                address,
                reason,
            )

    threading.Thread(target=ask, name="psengine-host-name", daemon=True).start()
