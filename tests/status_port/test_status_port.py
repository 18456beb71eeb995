"""A status port that other machines reach: TLS, a token for everything, and peers that mean no good."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
import time
import urllib.error
import urllib.request
from contextlib import ExitStack

import pytest
from support.certificates import make_certificate
from support.server_process import ServerFailedError, running_server

from psengine.errors import ConfigurationError
from psengine.status_port.access import Access, is_loopback, read_access
from psengine.status_port.certificate import load_certificate
from psengine.status_port.port import MAX_CONNECTIONS, MAX_REQUESTS, TEXT, Pages, StatusPort

TOKEN, READ_TOKEN = "correct-horse-battery-staple", "only-reads-only-reads"


def secret(folder, name, text):
    path = folder / name
    path.touch(mode=0o600)
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    made = make_certificate(folder)
    return {
        "status_cert": made.certificate,
        "status_key": made.key,
        "status_token": secret(folder, "token", TOKEN),
        "status_read_token": secret(folder, "read-token", READ_TOKEN),
    }


@pytest.fixture(scope="module")
def server(files):
    """One that other machines reach."""
    with running_server(status_bind="0.0.0.0", **files) as running:
        yield running


def here(url):
    """The port of a server that is bound to every address, by loopback's name."""
    return f"https://localhost:{url.rpartition(':')[2]}"


def ask(url, path, token=None, method="GET", ca=None, timeout_s=10):
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"{url}{path}", headers=headers, method=method)
    context = ssl.create_default_context(cafile=ca) if url.startswith("https") else None
    try:
        with urllib.request.urlopen(request, timeout=timeout_s, context=context) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refusal:
        with refusal:
            return refusal.status, refusal.read().decode()


@pytest.mark.parametrize("path", ["/metrics", "/status.json", "/healthz", "/history.json", "/nothing"])
def test_everything_needs_the_token(server, files, path):
    url, ca = here(server.status_url), files["status_cert"]
    for token in (None, "", TOKEN[:-1], f"{READ_TOKEN}x"):
        code, text = ask(url, path, token, ca=ca)
        assert code == 401, (path, token)
        assert "expected the header Authorization: Bearer TOKEN" in text
    for token in (TOKEN, READ_TOKEN):
        assert ask(url, path, token, ca=ca)[0] == (404 if path == "/nothing" else 200)
    assert TOKEN not in server.log()


def test_the_page_itself_knows_nothing_and_asks_for_the_token(server, files):
    code, page = ask(here(server.status_url), "/", ca=files["status_cert"])
    assert code == 200
    assert str(server.pid) not in page


def test_who_may_only_read_may_not_act(server, files):
    url, ca = here(server.status_url), files["status_cert"]
    assert ask(url, "/actions/shutdown", method="POST", ca=ca)[0] == 401
    code, text = ask(url, "/actions/shutdown", READ_TOKEN, "POST", ca=ca)
    assert (code, "--status-token" in text) == (401, True)
    assert ask(url, "/actions/forget?job=none", TOKEN, "POST", ca=ca)[0] == 404
    assert server.is_alive


def test_hosts_of_any_name_may_be_asked_where_a_token_is_needed(server, files):
    """A page of another site, by whatever name, does not have it."""
    address = ("127.0.0.1", int(server.status_url.rpartition(":")[2]))
    context = ssl.create_default_context(cafile=files["status_cert"])
    for extra, code in (("", b"401"), (f"Authorization: Bearer {READ_TOKEN}\r\n", b"200")):
        with (
            socket.create_connection(address, timeout=10) as raw,
            context.wrap_socket(raw, server_hostname="localhost") as client,
        ):
            client.sendall(f"GET /healthz HTTP/1.1\r\nHost: cluster.example\r\n{extra}\r\n".encode())
            assert client.recv(12).split()[1] == code


def test_handshakes_that_never_end_keep_nobody_away(files):
    pages = Pages({"/healthz": lambda: (200, TEXT, b"ok\n")})
    tls = load_certificate(files["status_cert"], files["status_key"])
    with StatusPort(0, pages, tls=tls) as port, ExitStack() as open_ones:
        address = ("127.0.0.1", int(port.url.rpartition(":")[2]))
        for begun in (b"", b"\x16\x03\x01\x02", b"GET / HTTP/1.0\r\n\r\n", bytes(100)):
            for _ in range(MAX_CONNECTIONS // 2):
                connection = open_ones.enter_context(socket.create_connection(address, timeout=10))
                connection.sendall(begun)
            url = f"https://localhost:{address[1]}"
            assert ask(url, "/healthz", ca=files["status_cert"])[0] == 200


def test_a_handshake_has_one_deadline_however_its_bytes_drip(files, monkeypatch):
    monkeypatch.setattr("psengine.status_port.port._Handler.timeout", 1.0)
    tls = load_certificate(files["status_cert"], files["status_key"])
    with StatusPort(0, Pages({}), tls=tls) as port:
        address = ("127.0.0.1", int(port.url.rpartition(":")[2]))
        with socket.create_connection(address, timeout=10) as client:
            has_ended = threading.Event()

            def drip():
                # A ClientHello of 500 bytes, one every 0.1 s.
                for byte in b"\x16\x03\x01\x01\xf4\x01\x00\x01\xf0" + bytes(200):
                    try:
                        client.sendall(bytes([byte]))
                    except OSError:
                        return
                    if has_ended.wait(0.1):
                        return

            began_s = time.monotonic()
            thread = threading.Thread(target=drip)
            thread.start()
            try:
                assert client.recv(100)[:1] in (b"", b"\x15")  # the end, or an alert before it
            except ConnectionResetError:
                pass
            finally:
                has_ended.set()
                thread.join(timeout=10)
            assert time.monotonic() - began_s < 8.0  # a read's own timeout would start anew with each byte


class BigPages(Pages):
    """A public page that no buffer holds, and one for those who have the token."""

    def __init__(self):
        super().__init__({"/": lambda: (200, TEXT, bytes(1 << 25)), "/metrics": lambda: (200, TEXT, b"all is well\n")})

    def is_public(self, path):
        return path == "/"


@pytest.fixture
def big_port(files):
    """The port, and a function that asks for its public page, and reads nothing yet."""
    tls = load_certificate(files["status_cert"], files["status_key"])
    trusting = ssl.create_default_context(cafile=files["status_cert"])
    with (
        StatusPort(0, BigPages(), access=Access(token=TOKEN, is_open=False), tls=tls) as port,
        ExitStack() as open_ones,
    ):

        def stranger():
            raw = open_ones.enter_context(socket.create_connection(("127.0.0.1", int(port.url.rpartition(":")[2]))))
            raw.settimeout(10)
            connection = open_ones.enter_context(trusting.wrap_socket(raw, server_hostname="localhost"))
            connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert connection.recv(12).endswith((b"200", b"503"))
            return connection

        yield here(port.url), stranger


def test_strangers_that_do_not_read_keep_nobody_away_who_has_the_token(big_port, files):
    url, stranger = big_port
    for _ in range(MAX_REQUESTS + 1):
        stranger()
    assert ask(url, "/", ca=files["status_cert"])[0] == 503
    assert ask(url, "/metrics", TOKEN, ca=files["status_cert"]) == (200, "all is well\n")


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "::1", "[::1]"])
def test_loopback_is_open_as_before(host):
    assert is_loopback(host)
    assert read_access(host, token=None, read_token=None, has_certificate=False).may_read(None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.com", "127.0.0.1.nip.io", "", "*"])
def test_elsewhere_needs_a_certificate_and_a_token(host, files):
    token = files["status_token"]
    for given in (
        {"token": None, "read_token": None, "has_certificate": True},
        {"token": token, "read_token": None, "has_certificate": False},
    ):
        with pytest.raises(ConfigurationError, match=r"needs a certificate and a token.*ssh -L"):
            read_access(host, **given)
    access = read_access(host, token=token, read_token=None, has_certificate=True)
    assert not access.may_read(None)
    assert access.may_read(f"bearer {TOKEN}")


def test_a_server_that_others_would_reach_unprotected_does_not_start():
    with (
        pytest.raises(ServerFailedError, match=r"exit code 2(.|\n)*--status-cert"),
        running_server(status_bind="0.0.0.0"),
    ):
        pass


def test_certificates_that_are_no_good_are_refused_at_the_start(tmp_path):
    good, other = make_certificate(tmp_path, "good"), make_certificate(tmp_path, "other")
    old = make_certificate(tmp_path, "old", until="20210101000000Z")
    load_certificate(good.certificate, good.key)
    for certificate, key, words in (
        (old.certificate, old.key, "certificate has expired"),
        (good.certificate, other.key, "key values mismatch"),
        (tmp_path / "none", good.key, "No such file"),
        (tmp_path / "config", good.key, "PEM"),
    ):
        with pytest.raises(ConfigurationError, match=rf"(?i)cannot be used.*{words}.*openssl req"):
            load_certificate(certificate, key)
    good.key.chmod(0o640)
    with pytest.raises(ConfigurationError, match="mode 0600"):
        load_certificate(good.certificate, good.key)


def test_a_key_with_a_password_is_refused_and_nobody_is_asked(tmp_path):
    made = make_certificate(tmp_path)
    locked = tmp_path / "locked.key"
    command = ["openssl", "pkcs8", "-topk8", "-in", made.key, "-out", locked, "-passout", "pass:abcd"]
    assert subprocess.run(command, capture_output=True, timeout=30).returncode == 0
    locked.chmod(0o600)
    with pytest.raises(ConfigurationError, match="has a password"):
        load_certificate(made.certificate, locked)


def test_an_expired_certificate_ends_the_server(tmp_path, files):
    old = make_certificate(tmp_path, until="20210101000000Z")
    given = {**files, "status_cert": old.certificate, "status_key": old.key}
    with pytest.raises(ServerFailedError, match=r"exit code 2(.|\n)*has expired"), running_server(**given):
        pass
