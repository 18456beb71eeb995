"""The service manager's notification socket (``sd_notify(3)``), without libsystemd."""

from __future__ import annotations

import logging
import socket

from psengine.environment.variables import read_variable

logger = logging.getLogger(__name__)


def notify(state: str) -> None:
    """Tell the service manager, such as ``notify("READY=1")``.

    Does nothing without NOTIFY_SOCKET, and only logs where it fails.
    """
    address = read_variable("NOTIFY_SOCKET")
    if not address or address[0] not in "/@":
        return
    # An abstract socket's name begins with a zero byte, which the variable spells "@".
    target = "\0" + address[1:] if address[0] == "@" else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
            sender.settimeout(1.0)
            sender.connect(target)
            sender.sendall(state.encode())
    except OSError as error:
        logger.warning("the service manager at NOTIFY_SOCKET=%s was not told %s: %s", address, state, error)
