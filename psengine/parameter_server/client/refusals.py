"""Errors of a client that a server does not let in, or that should not trust a server: the reason and every fix."""

from __future__ import annotations

import os

from psengine.environment.local_sockets import is_loopback, socket_beside
from psengine.errors import AuthenticationError, ConfigurationError
from psengine.protocol.keys import CurveClientKeys

_ANY_SECRET = "--secret-file FILE at the server and PSENGINE_SECRET_FILE=FILE here, one secret for both"


def refused(address: str, way: str, keys: CurveClientKeys | None) -> AuthenticationError:
    """The server at ``address``, reached at ``way``, refused this client with these keys."""
    if keys is not None:
        return unfitting_keys(address, keys, "the server does not know this client's public key")
    if way.startswith("ipc://"):
        return AuthenticationError(
            f"{address} does not let this client in: it takes connections of its own user and of root alone (expected"
            f" one of these, got user {os.geteuid()}). Fix: start this client as the server's user; or bind the server"
            f" to TCP, with {_ANY_SECRET}; or with keys (psengine-server keygen)."
        )
    return AuthenticationError(
        f"{address} does not let this client in: over TCP it takes nobody without a secret or keys, and its own user's"
        f" clients come through its Unix socket (expected that {_place(address)}, got none). Fix: start this client as"
        f" the server's user, on its machine, with the server's PSENGINE_RUNTIME_DIR if it has one; or"
        f" {_ANY_SECRET}; or keys (psengine-server keygen); or, where every user of the server's machine may change its"
        " models, psengine-server --insecure."
    )


def _place(address: str) -> str:
    try:
        return f"at {socket_beside(address).removeprefix('ipc://')}" if is_loopback(address) else "on its machine"
    except ConfigurationError as error:
        return f"in a directory of ours: {error}"


def unfitting_keys(address: str, keys: CurveClientKeys | None, reason: str) -> AuthenticationError:
    """The handshake failed: the two sides' keys do not fit, or one side has none."""
    if keys is not None and keys.secret_file:
        return AuthenticationError(
            f"{address} does not let this client in with the secret in {keys.secret_file}: {reason}. Fix: give both"
            " sides the same secret: start the server with --secret-file, and set PSENGINE_SECRET_FILE to a copy here."
        )
    shown = "without CURVE keys" if keys is None else "with the CURVE keys it was given"
    return AuthenticationError(
        f"{address} does not let this client in {shown}: {reason}. Fix: give both sides the keys that"
        " psengine-server keygen wrote, and add the client's public key to the server's allow-list; or, where the"
        " server has a secret (--secret-file), set PSENGINE_SECRET_FILE to a copy here."
    )


def another_user(address: str, uid: int | None) -> AuthenticationError:
    """Another user's process listens at an address where no keys prove who it is."""
    return AuthenticationError(
        f"{address} is another user's, who could hand out any weights (expected a server of user {os.geteuid()} or of"
        f" root, got user {uid}'s). Fix: name a server of your own; or, to trust this one, {_ANY_SECRET}; or keys"
        " (psengine-server keygen)."
    )
