"""The status port: what it serves to whom, and that nothing can be changed there."""

import http.client
import re
import socket
from contextlib import ExitStack

import pytest
from support.server_process import running_server
from support.statuses import TIMES, shard, worker
from support.statuses import server as server_status

from psengine.status_port.http_status import MAX_CONNECTIONS, HttpStatus
from psengine.status_port.pages import dashboard, render_metrics
from psengine.status_port.status_model import SnapshotStatus


def ask(url, path, method="GET", host=None):
    """(code, headers, content) of one request, with whatever Host."""
    address = url.removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=10)
    try:
        connection.putrequest(method, path, skip_host=True)
        for one in [address] if host is None else host:
            connection.putheader("Host", one)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


def test_the_page_needs_nothing_from_elsewhere_and_runs_its_own_code_only(server):
    code, headers, page = ask(server.status_url, "/")
    assert (code, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert page == dashboard().decode()
    given = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)[1]
    policy = dict(part.strip().split(" ", 1) for part in given.split(";"))
    assert policy["default-src"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["connect-src"] == "'self'"
    for kind in ("script-src", "style-src"):
        assert re.fullmatch(r"'sha256-[A-Za-z0-9+/]{43}='", policy[kind])
    assert (headers["X-Content-Type-Options"], headers["X-Frame-Options"]) == ("nosniff", "DENY")
    assert not [name for name in headers if name.lower().startswith("access-control")]
    # Nothing that would turn a server's text into markup, and no address but namespaces.
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "setTimeout('", "srcdoc"):
        assert way not in page
    assert set(re.findall(r"https?://[^\"'\s)]+", page)) == {"http://www.w3.org/2000/svg"}


OWN, OTHERS = ("127.0.0.1:1", "LOCALHOST:65535", "[::1]:8000"), ("evil.example:9100", "localhost.evil.example")
OTHERS += ("127.0.0.1.nip.io", "0.0.0.0:9100", "")


def test_names_of_this_machine_alone_are_answered(server):
    for hosts, code in (*(([one], 200) for one in OWN), *(([one], 421) for one in OTHERS), ([], 421)):
        for path in ("/", "/status.json"):
            assert ask(server.status_url, path, host=hosts)[0] == code, hosts


def test_beyond_loopback_any_name_will_do_and_reads_alone():
    with running_server(status_bind="0.0.0.0") as server:
        url = f"http://127.0.0.1:{server.status_url.rpartition(':')[2]}"
        assert ask(url, "/status.json", host=["cluster.example"])[0] == 200


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("GET", "/../etc/passwd", 404),
        ("POST", "/actions/shutdown", 501),
        ("HEAD", "/status.json", 200),
    ],
)
def test_what_is_not_there(server, method, path, code):
    assert ask(server.status_url, path, method)[0] == code
    assert "Traceback" not in server.log()
    assert server.is_alive


def test_connections_beyond_the_limit_are_closed_and_make_room():
    with HttpStatus(0, {"/": lambda: (200, "text/plain", b"here")}) as port:
        address = ("127.0.0.1", int(port.url.rpartition(":")[2]))
        with ExitStack() as open_ones:
            idle = [open_ones.enter_context(socket.create_connection(address, 10)) for _ in range(MAX_CONNECTIONS)]
            with socket.create_connection(address, 10) as one_more:
                assert one_more.recv(1) == b""
            idle[0].sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
            assert idle[0].recv(12) == b"HTTP/1.0 200"
        with socket.create_connection(address, 10) as later:
            later.sendall(b"GET / HTTP/1.0\r\nHost: localhost\r\n\r\n")
            later.recv(12)


@pytest.fixture
def metrics():
    """Of a server with a worker of which all is known, 2 steps behind another."""
    snapshot = SnapshotStatus(interval_s=1.0, generation=1, age_s=2.0, last_seconds=0.1, failures=0, last_error="")
    workers = [worker(3, step=12, staleness={1: 9, 5: 1}, **TIMES), worker(4, step=14)]
    counts = {"refused": {"non_finite": 2}, "staleness": {0: 2, 64: 1}, "staleness_sum": 500}
    counts |= {"table_rows": {"users": 7}, "table_bytes": {"users": 900}, "table_evicted": {"users": 3}}
    status = server_status(shard(*workers, name="j", **counts), snapshot=snapshot)
    return render_metrics(status)[1].decode()


def test_metrics_tell_of_workers(metrics):
    for name, value in {
        "step": 12.0, "lag_steps": 2.0, "loss": 0.25, "step_seconds": 0.5, "compute_seconds": 0.2,
        "blocked_seconds": 0.3, "staleness_p99": 5.0,
    }.items():  # fmt: skip
        assert f'psengine_worker_{name}{{training_job="j",worker="3"}} {value}' in metrics, metrics
    for line in (
        'psengine_job_workers{state="live",training_job="j"} 2.0',
        'psengine_staleness_bucket{le="+Inf",shard="0",training_job="j"} 3.0',
        'psengine_staleness_sum{shard="0",training_job="j"} 500.0',
        'psengine_table_rows{shard="0",table="users",training_job="j"} 7.0',
        'psengine_table_bytes{shard="0",table="users",training_job="j"} 900.0',
        'psengine_table_evicted_total{shard="0",table="users",training_job="j"} 3.0',
    ):
        assert line in metrics, metrics
    # Prometheus would rename it: the label is its own, of what it scrapes.
    assert not re.search(r"[{,]job=", metrics)
