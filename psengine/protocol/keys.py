"""CURVE keys in files. No zmq, no key generation.

    NAME.key   public <40 characters> NAME      mode 0600: who this side is
               secret <40 characters>
    NAME.pub   public <40 characters> NAME      for the other side

Keys are Z85 text (https://rfc.zeromq.org/spec/32). Lines that begin with ``#`` are comments; a file of public keys may
hold many lines.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from pathlib import Path

from psengine.errors import ConfigurationError

TOKEN_CHARACTERS = (16, 1000)
_KEY = r"[0-9a-zA-Z.:+=^!/*?&<>()\[\]{}@%$#-]{40}"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,99}")
_LARGEST_FILE_BYTES = 1024 * 1024


@dataclass(frozen=True)
class KeyPair:
    """A public key and its secret, as Z85 text; the secret does not show in ``repr``."""

    public: str
    secret: str = field(repr=False)


@dataclass(frozen=True)
class CurveClientKeys:
    """A client's keys for a server with CURVE.

    Attributes:
        own: the client's key pair; the server knows its public half.
        server_public: the server's public key.
        secret_file: the secret that both were computed from; "" for keys of keygen.
    """

    own: KeyPair
    server_public: str
    secret_file: str = ""

    @classmethod
    def load(cls, own_key: str | Path, server_public: str | Path) -> CurveClientKeys:
        """Read the client's NAME.key and the server's NAME.pub.

        Raises:
            ConfigurationError: a file is missing or malformed, or others could read the secret.
        """
        keys = read_allowed(server_public)
        if len(keys) != 1:
            raise ConfigurationError(f"{server_public} must hold one public key (expected 1, got {len(keys)}).")
        return cls(read_key_pair(own_key), keys.pop())


def write_key_pair(directory: str | Path, name: str, pair: KeyPair) -> tuple[Path, Path]:
    """Write ``NAME.key`` (mode 0600) and ``NAME.pub`` into ``directory``, which is made; never overwrites.

    Returns:
        The two paths.

    Raises:
        ConfigurationError: the name is no file name, a file exists already, or the directory cannot be written.
    """
    if not _NAME.fullmatch(name):
        raise ConfigurationError(
            "A key's name becomes a file name (expected up to 100 letters, digits and ._@-, beginning with a letter or"
            f" digit, got {name!r})."
        )
    folder = Path(directory)
    secret_path, public_path = folder / f"{name}.key", folder / f"{name}.pub"
    public_line = f"public {pair.public} {name}\n"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if public_path.exists():
            raise FileExistsError(17, "File exists", str(public_path))
        secret_path.touch(0o600, exist_ok=False)
        secret_path.write_text(f"# Secret: for the owner's eyes only.\n{public_line}secret {pair.secret}\n")
        public_path.write_text(public_line)
    except OSError as error:
        raise ConfigurationError(
            f"Keys could not be written to {folder} (expected a directory we can write to, without {name}.key and"
            f" {name}.pub; got {error}). Fix: choose another directory or name; keys are never overwritten."
        ) from error
    return secret_path, public_path


def read_key_pair(path: str | Path) -> KeyPair:
    """Read a ``NAME.key``.

    Raises:
        ConfigurationError: the file is missing or malformed, or another user may own, read or write it.
    """
    found = dict(_entries(Path(path), "public|secret"))
    if len(found) != 2:
        raise ConfigurationError(
            f"{path} is no key pair (expected one line 'public KEY' and one line 'secret KEY', got"
            f" {sorted(found) or 'neither'}). Fix: name the .key file that psengine-server keygen wrote."
        )
    return KeyPair(found["public"], found["secret"])


def read_allowed(path: str | Path) -> set[str]:
    """The public keys of all ``*.pub`` in a directory, or of a file with one ``public KEY NAME`` a line.

    Raises:
        ConfigurationError: nothing is there, or a file is malformed.
    """
    folder = Path(path)
    files = sorted(folder.glob("*.pub")) if folder.is_dir() else [folder]
    return {key for file in files for _, key in _entries(file, "public")}


def read_token(path: str | Path) -> str:
    """Read the secret of server and clients: the only word of a file that no other user can read.

    Raises:
        ConfigurationError: the file is missing, another user may own, read or write it, or it holds no good secret.
    """
    words = _read(path, is_secret=True, expected="a file that holds a secret of server and clients").split()
    if len(words) != 1 or not TOKEN_CHARACTERS[0] <= len(words[0]) <= TOKEN_CHARACTERS[1]:
        raise ConfigurationError(
            f"{path} holds no secret of server and clients (expected one word of {TOKEN_CHARACTERS[0]} to"
            f" {TOKEN_CHARACTERS[1]} characters, got words of {[len(word) for word in words[:4]]}). Fix: python -c"
            f" 'import secrets; print(secrets.token_urlsafe(32))' > {path}"
        )
    return words[0]


def read_login(path: str | Path) -> tuple[str, str]:
    """Read a user's name and password: the only line, NAME:PASSWORD, of a file that no other user can read.

    Raises:
        ConfigurationError: the file is missing, another user may own, read or write it, or it holds no such line.
    """
    name, colon, password = _read(path, is_secret=True, expected="a file that holds a login").strip().partition(":")
    if not (name and colon and password) or "\n" in password:
        raise ConfigurationError(f"{path} holds no login (expected one line, NAME:PASSWORD, got another text).")
    return name, password


def _entries(path: Path, kinds: str) -> list[tuple[str, str]]:
    """(kind, key) of each line."""
    lines = _read(path, is_secret="secret" in kinds, expected="a file of psengine-server keygen").splitlines()
    entries = []
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        entry = re.fullmatch(rf"({kinds}) ({_KEY})( \S+)?\s*", line)
        if entry is None:
            raise ConfigurationError(
                f"{path}, line {number}, is not understood (expected 'public KEY NAME' or, in a .key file, 'secret"
                " KEY', where KEY is 40 characters of Z85)."
            )
        entries.append((entry[1], entry[2]))
    return entries


def _read(path: str | Path, *, is_secret: bool, expected: str) -> str:
    try:
        with open(path, "rb") as file:
            status = os.fstat(file.fileno())
            text = file.read(_LARGEST_FILE_BYTES).decode("ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"The file {path} cannot be read (expected {expected}, got: {error}).") from error
    mode = stat.S_IMODE(status.st_mode)
    if is_secret and (mode & 0o077 or status.st_uid != os.geteuid()):
        raise ConfigurationError(
            f"The secret file {path} must be ours alone (expected owner {os.geteuid()} and mode 0600, got owner"
            f" {status.st_uid} and mode {mode:04o}). Fix: chown it to the user that runs this, and chmod 600 {path};"
            " if others could read it, make a new one."
        )
    return text
