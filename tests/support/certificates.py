"""Certificates for 127.0.0.1 and localhost, made by the openssl program."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

CONFIG = """
[ca]
default_ca = own
[own]
database = index
new_certs_dir = .
rand_serial = yes
default_md = sha256
policy = any
x509_extensions = extensions
[any]
commonName = supplied
[extensions]
subjectAltName = DNS:localhost,IP:127.0.0.1
basicConstraints = critical,CA:TRUE
keyUsage = critical,digitalSignature,keyCertSign
subjectKeyIdentifier = hash
"""


@dataclass(frozen=True)
class Certificate:
    """Files in PEM."""

    certificate: Path
    key: Path


def make_certificate(folder: Path, name: str = "status", *, until: str = "20991231235959Z") -> Certificate:
    """A certificate that signs itself, valid from 2020 on; skips the test where the program is missing."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the package openssl")
    (folder / "index").write_text("")
    (folder / "config").write_text(CONFIG)
    made = Certificate(folder / f"{name}.crt", folder / f"{name}.key")
    for command in (
        f"req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout {name}.key -out request"
        " -subj /CN=localhost",
        f"ca -batch -notext -selfsign -config config -keyfile {name}.key -in request -out {name}.crt"
        f" -startdate 20200101000000Z -enddate {until}",
    ):
        done = subprocess.run(["openssl", *command.split()], cwd=folder, capture_output=True, text=True, timeout=30)
        assert done.returncode == 0, done.stderr
    made.key.chmod(0o600)
    return made
