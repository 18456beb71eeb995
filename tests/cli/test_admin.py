"""``psengine admin``, against servers with workers."""

from __future__ import annotations

import re
import socket
import threading
import time

import pytest
import torch
from support.certificates import make_certificate
from support.server_process import Peer, running_server
from support.waiting import eventually
from support.web_pages import web_page

import psengine
from psengine.cli.main import main

TOKEN = "correct-horse-battery-staple"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in ("SERVERS", "STATUS_TOKEN", "STATUS_READ_TOKEN", "STATUS_CA"):
        monkeypatch.delenv(f"PSENGINE_{name}", raising=False)


@pytest.fixture(scope="module")
def token(tmp_path_factory):
    path = tmp_path_factory.mktemp("admin") / "token"
    path.touch(mode=0o600)
    path.write_text(TOKEN)
    return path


@pytest.fixture(scope="module")
def server(token, tmp_path_factory):
    folder = tmp_path_factory.mktemp("snapshots")
    with running_server(status_token=token, snapshot_dir=folder, snapshot_interval_s=0.0) as running:
        yield running


@pytest.fixture
def admin(capsys, token):
    """Exit code, and what was printed, of a command line; ``server`` may be several."""

    def run(*words, server=None, token=token):
        address = getattr(server, "status_url", server)
        servers = [] if address is None else ["--server-address", address]
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            main(["admin", *words, *servers, *([] if token is None else ["--token", str(token)])])
        said = capsys.readouterr()
        return end.value.code or 0, said.out + said.err

    return run


def test_a_snapshot_an_eviction_and_the_end_of_a_job(server, admin):
    with Peer(server.addresses[0]) as peer:
        peer.make_job(torch.zeros(10))
        assert admin("snapshot", server=server) == (0, f"{server.status_url}: Durable to generation 1.\n")
        code, said = admin("evict", "--job", "job", "--worker", "7", server=server)
        assert (code, "There is no worker 7 in job 'job'. Its workers: 0." in said) == (1, True)
        code, said = admin("evict", "--job", "jub", "--worker", "0", server=server)
        assert (code, "Did you mean 'job'?" in said) == (1, True)
        code, said = admin("forget", "--job", "job", server=server)
        assert (code, "in use (expected no workers, got 1)" in said) == (1, True)
        assert admin("evict", "--job", "job", "--worker", "0", server=server)[0] == 0
        code, said = admin("forget", "--job", "completely-different", server=server)
        assert (code, "Its jobs: 'job'." in said) == (1, True)
        assert admin("forget", "--job", "job", server=server)[0] == 0
        assert "job" not in server.status()["jobs"]


def test_all_named_servers_are_told_and_one_may_not_know_the_worker(server, admin, token):
    with running_server(status_token=token) as other, Peer(server.addresses[0]) as peer:
        peer.job = "at-one"
        peer.make_job(torch.zeros(10))
        both = f"{server.status_url},{other.status_url}"
        code, said = admin("evict", "--job", "at-one", "--worker", "0", server=both)
        assert (code, said.count("\n")) == (0, 2)
        assert "There is no worker 0" in said
        code, said = admin("snapshot", server=both)
        assert (code, "keeps no snapshots (expected a --snapshot-dir)" in said) == (1, True)


def test_who_has_no_token_or_a_wrong_one(server, admin, tmp_path, monkeypatch):
    code, said = admin("snapshot", server=server, token=None)
    assert (code, "--token FILE or PSENGINE_STATUS_TOKEN" in said) == (2, True)
    wrong = tmp_path / "wrong"
    wrong.touch(mode=0o600)
    wrong.write_text("wrong-wrong-wrong-wrong")
    code, said = admin("shutdown", server=server, token=wrong)
    assert (code, "needs the token of --status-token" in said) == (1, True)
    monkeypatch.setenv("PSENGINE_STATUS_TOKEN", str(wrong))
    assert admin("shutdown", server=server, token=None)[0] == 1
    wrong.chmod(0o644)
    code, said = admin("shutdown", server=server, token=wrong)
    assert (code, "mode 0600" in said) == (2, True)
    assert server.is_alive


@pytest.mark.parametrize(
    ("address", "code", "words"),
    [
        (None, 2, "got nothing"),
        ("tcp://127.0.0.1:7077", 2, "expected --server-address http://HOST:PORT"),
        ("http://", 2, "malformed"),
        ("http://10.0.0.1:9100", 2, "a token is not sent in the clear"),
        ("free", 1, "did not answer: .*refused"),
    ],
)
def test_addresses_that_are_no_status_port(admin, address, code, words):
    if address == "free":
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            address = f"http://127.0.0.1:{taken.getsockname()[1]}"
    found, said = admin("snapshot", server=address)
    assert found == code, said
    assert re.search(words, said), said


def test_a_token_is_not_taken_along_by_a_redirect(server, admin):
    with web_page(b"", 307, {"Location": f"{server.status_url}/actions/shutdown"}) as elsewhere:
        code, said = admin("shutdown", server=elsewhere)
        assert (code, "307" in said) == (1, True)
    assert server.is_alive


def test_over_tls_the_certificate_has_to_be_trusted(admin, token, tmp_path, monkeypatch):
    made = make_certificate(tmp_path)
    options = {"status_cert": made.certificate, "status_key": made.key, "status_token": token}
    with running_server(status_bind="0.0.0.0", **options) as server:
        address = f"https://localhost:{server.status_url.rpartition(':')[2]}"
        code, said = admin("drain", server=address)
        assert (code, "its certificate is not trusted" in said) == (1, True)
        monkeypatch.setenv("PSENGINE_STATUS_CA", str(tmp_path / "none"))
        assert admin("drain", server=address)[0] == 2
        assert admin("drain", "--ca", str(made.certificate), server=address)[0] == 0
        assert server.wait() == 0


def test_a_drained_server_keeps_its_workers_and_ends_with_the_last(admin, token, tmp_path):
    weights = {"w": torch.zeros(4)}
    with running_server(status_token=token, snapshot_dir=tmp_path / "s", snapshot_interval_s=0.0) as server:
        with psengine.connect(server.addresses[0], job="kept", rank=0) as client:
            client.register(weights, optimizer=torch.optim.SGD(list(weights.values()), lr=1.0))
            code, said = admin("drain", server=server)
            assert (code, "It ends when the last of 1 has left" in said) == (0, True)
            assert server.status()["is_draining"] is True
            # Others are not let in: neither to this job, nor to another.
            for job, rank in (("kept", 1), ("other", 0)):
                with Peer(server.addresses[0]) as peer:
                    peer.job = job
                    refused = peer.hello(rank=rank)
                    assert refused.body["code"] == "shutting_down"
                    assert "psengine admin drain" in refused.body["text"]
            # Its own worker goes on, and may come back.
            client.push_pull({"w": torch.ones(4)}, into=weights)
            assert weights["w"].tolist() == [-1.0] * 4
            code, said = admin("drain", "--wait-s", "1.5", server=server)
            assert (code, "waits for worker 0 of job 'kept'" in said, "still drains" in said) == (1, True, True)
            assert server.is_alive
        assert server.wait() == 0
        assert "shutting down: drained" in server.log()
    with (
        running_server(snapshot_dir=tmp_path / "s") as again,
        psengine.connect(again.addresses[0], job="kept", role="reader") as reader,
    ):
        assert reader.pull()["w"].tolist() == [-1.0] * 4


def test_an_evicted_worker_comes_back_to_a_draining_server(admin, token):
    """Its process was here before; and a process that takes a dead one's rank succeeds it."""
    with (
        running_server(status_token=token, lease_s=2.0) as server,
        Peer(server.addresses[0]) as peer,
        Peer(server.addresses[0]) as keeper,
    ):
        peer.make_job(torch.zeros(4))
        assert keeper.hello(rank=1).type.name == "WELCOME"
        assert admin("drain", server=server)[0] == 0
        assert admin("evict", "--job", "job", "--worker", "0", server=server)[0] == 0
        assert peer.hello().type.name == "WELCOME"
        assert keeper.request("BYE").type.name == "OK"
        # The last one too: the server waits for it for a lease.
        assert admin("evict", "--job", "job", "--worker", "0", server=server)[0] == 0
        time.sleep(0.5)
        assert peer.hello().type.name == "WELCOME"
        assert admin("evict", "--job", "job", "--worker", "0", server=server)[0] == 0
        assert server.wait() == 0


def test_drain_waits_for_the_end(admin, token):
    with running_server(status_token=token) as server, Peer(server.addresses[0]) as peer:
        peer.make_job(torch.zeros(4))
        leaving = threading.Timer(1.0, lambda: peer.request("BYE"))
        leaving.start()
        try:
            code, said = admin("drain", "--wait-s", "30", server=server)
        finally:
            leaving.join(timeout=10)
        assert (code, said.count("has ended")) == (0, 1)
        eventually(lambda: not server.is_alive, timeout_s=15)
