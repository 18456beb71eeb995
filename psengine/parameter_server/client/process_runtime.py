"""The runtime of a client in a process: its monotonic clock, the system's randomness, ZeroMQ's sockets on a thread."""

from __future__ import annotations

import random
import time

from psengine.parameter_server.client.connection import Connection
from psengine.parameter_server.client.options import SessionOptions
from psengine.parameter_server.client.reachability import watch_first_contact
from psengine.parameter_server.client.runtime import Receiver, Runtime, Transport


def _connect(receiver: Receiver, options: SessionOptions) -> Transport:
    return Connection(
        receiver, keys=options.keys, checksum=options.checksum, uses_local_socket=options.uses_local_socket
    )


PROCESS = Runtime(
    now_s=time.monotonic,
    draw_nonce=lambda: random.SystemRandom().getrandbits(64),
    connect=_connect,
    watch=watch_first_contact,
)
