"""How both ends of a TCP connection find that the other end's host is gone."""

from __future__ import annotations

import zmq

# A peer whose host says nothing is cut off after 25 s where nothing moves, 60 s where something is to be sent.
KEEPALIVE = {
    zmq.TCP_KEEPALIVE: 1,
    zmq.TCP_KEEPALIVE_IDLE: 10,
    zmq.TCP_KEEPALIVE_INTVL: 5,
    zmq.TCP_KEEPALIVE_CNT: 3,
    zmq.TCP_MAXRT: 60_000,
}
