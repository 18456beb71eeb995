"""One secret on both sides instead of keys: CURVE pairs of a server and its clients, computed from it.

Whoever has the secret has both pairs, so that each side knows the other, and nobody hears the secret itself: a
listener at a server's address that has it not learns nothing by which it could pretend to.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import zmq
from zmq.utils import z85

from psengine.protocol.keys import CurveClientKeys, KeyPair, read_token


def pairs_of_secret(path: str | Path) -> tuple[KeyPair, KeyPair]:
    """The server's and the clients' pair.

    Raises:
        ConfigurationError: the file is missing, is not ours alone, or holds no secret.
    """
    secret = read_token(path).encode()
    return _pair(secret, b"psengine server"), _pair(secret, b"psengine client")


def client_keys_of_secret(path: str | Path) -> CurveClientKeys:
    """What a client needs to talk to a server that has the same secret. Raises like ``pairs_of_secret``."""
    server, client = pairs_of_secret(path)
    return CurveClientKeys(client, server.public, secret_file=str(path))


def _pair(secret: bytes, purpose: bytes) -> KeyPair:
    private = z85.encode(hashlib.blake2b(secret, digest_size=32, person=purpose).digest())
    return KeyPair(zmq.curve_public(private).decode(), private.decode())
