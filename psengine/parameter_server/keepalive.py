"""How both ends of a TCP connection find that the other end's host is gone."""

from __future__ import annotations

import math

import zmq


def keep_alive(lease_s: float) -> dict[int, int]:
    """Socket options by which a connection to a host that says nothing ends within about a lease.

    The kernel counts whole seconds, and two probes may be lost: it is three seconds at least.
    """
    third_s = max(1, math.floor(lease_s / 3))
    return {
        zmq.TCP_KEEPALIVE: 1,
        zmq.TCP_KEEPALIVE_IDLE: third_s,
        zmq.TCP_KEEPALIVE_INTVL: third_s,
        zmq.TCP_KEEPALIVE_CNT: 2,
        zmq.TCP_MAXRT: max(1000, int(lease_s * 1000)),  # where something is to be sent
    }
