"""The CURVE keys that a server accepts, of workers and of operators: of a list in files, or derived from a secret."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TypeAlias

from psengine.errors import ConfigurationError
from psengine.parameter_server.server.settings import ServerSettings
from psengine.parameter_server.shared_secret import operator_pair, pairs_of_secret
from psengine.protocol.keys import read_allowed, read_key_pair

logger = logging.getLogger(__name__)

# How often the list is read again, so that workers can be added and removed while the server runs.
RELOAD_S = 1.0


class KeyList:
    """The public keys of files, all valid at the start.

    They are read again while the server runs; then a missing or malformed file allows nobody. Connected clients stay.

    Args:
        path: directory or file of public keys.

    Raises:
        ConfigurationError: a file is missing or malformed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._allowed = read_allowed(path)
        # Errors of the last reading; each is logged once.
        self._faults: set[str] = set()
        self._read_s = time.monotonic()

    def __len__(self) -> int:
        return len(self._allowed)

    def allows(self, key: str) -> bool:
        """Whether this public key is among them."""
        now_s = time.monotonic()
        if now_s - self._read_s > RELOAD_S:
            self._read_s = now_s
            self._allowed, faults = _read_what_is_good(self._path)
            for fault in sorted(faults - self._faults):
                logger.error("keys that cannot be read are not allowed: %s", fault)
            self._faults = faults
        return key in self._allowed


class AllowedKeys:
    """Clients with a key of ``allow``.

    Args:
        curve_key: the server's ``.key`` file.
        allow: directory or file of public keys, see ``KeyList``.

    Attributes:
        pair: the server's own.
        names_peers: whether a key says which client it is, so that a worker belongs to the key it came with.

    Raises:
        ConfigurationError: a file is missing, malformed, or readable by others.
    """

    names_peers = True

    def __init__(self, curve_key: Path, allow: Path) -> None:
        self.pair = read_key_pair(curve_key)
        self._list = KeyList(allow)
        if self._list.allows(self.pair.public):
            logger.warning("the server's own key is among the allowed clients in %s", allow)

    def describe(self) -> str:
        """For the lines of start-up."""
        return f"{len(self._list)} keys allowed"

    def allows(self, key: str) -> bool:
        """Whether a client with this public key may come in."""
        return self._list.allows(key)


class SecretKeys:
    """Clients that have the secret of a file, which is read once; see ``AllowedKeys`` for attributes and methods.

    Raises:
        ConfigurationError: the file is missing, is not ours alone, or holds no secret.
    """

    names_peers = False

    def __init__(self, secret_file: Path) -> None:
        self.pair, client = pairs_of_secret(secret_file)
        self._client_public = client.public

    def describe(self) -> str:
        """Likewise."""
        return "whoever has the secret is allowed"

    def allows(self, key: str) -> bool:
        """Likewise. The key is public to whoever has the secret, so the comparison's time discloses nothing."""
        return key == self._client_public


class OperatorSecret:
    """Operators that have a second secret, see ``KeyList.allows``.

    Raises:
        ConfigurationError: see ``SecretKeys``; or it is the workers' secret.
    """

    def __init__(self, admin_secret_file: Path, secret_file: Path) -> None:
        if pairs_of_secret(admin_secret_file) == pairs_of_secret(secret_file):
            raise ConfigurationError(
                "Operators have a secret of their own (expected another word in admin_secret_file than in secret_file,"
                f" got the same in {admin_secret_file} and {secret_file})."
            )
        self._public = operator_pair(admin_secret_file).public

    def __len__(self) -> int:
        return 1

    def allows(self, key: str) -> bool:
        """Whether this public key comes from the secret."""
        return key == self._public


KeyRing: TypeAlias = AllowedKeys | SecretKeys
OperatorKeys: TypeAlias = KeyList | OperatorSecret


def key_ring(settings: ServerSettings) -> KeyRing | None:
    """The keys of those who may connect; None where there are none."""
    if settings.curve_key is not None and settings.allow is not None:
        return AllowedKeys(settings.curve_key, settings.allow)
    return None if settings.secret_file is None else SecretKeys(settings.secret_file)


def operators(settings: ServerSettings) -> OperatorKeys | None:
    """The keys of those who may give orders; None where there are none."""
    if settings.admin_allow is not None:
        return KeyList(settings.admin_allow)
    if settings.admin_secret_file is None or settings.secret_file is None:
        return None
    return OperatorSecret(settings.admin_secret_file, settings.secret_file)


def _read_what_is_good(allow: Path) -> tuple[dict[str, str], set[str]]:
    """``read_allowed`` file by file, and errors: one malformed file must not keep a removed key allowed."""
    keys: dict[str, str] = {}
    faults: set[str] = set()
    try:
        files = sorted(path for path in allow.iterdir() if path.name.endswith(".pub"))
    except NotADirectoryError:
        files = [allow]
    except OSError as error:
        return {}, {f"{allow} cannot be read, so that nobody is let in any more ({error.strerror})"}
    for file in files:
        try:
            keys.update(read_allowed(file))
        except (ConfigurationError, OSError) as error:
            faults.add(str(error))
    return keys, faults
