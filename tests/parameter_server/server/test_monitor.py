"""The status port: who may ask what, what it says of itself, and what it does for those who know the token."""

from __future__ import annotations

import http.client
import json
import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.server_process import Peer, ServerFailedError, running_server
from support.shard_world import World, spec, team
from support.statuses import TIMES, shard, worker
from support.statuses import server as server_status

from psengine.errors import ConfigurationError
from psengine.parameter_server.client.embedded import EmbeddedServer
from psengine.parameter_server.server import shard_group
from psengine.parameter_server.server.daemon import Server
from psengine.parameter_server.server.settings import ServerSettings
from psengine.parameter_server.server.shard_group import ShardGroup
from psengine.parameter_server.server.status.actions import Actions
from psengine.parameter_server.server.status.dashboard_page import dashboard
from psengine.parameter_server.server.status.exposition import render_metrics
from psengine.parameter_server.server.status.history import History
from psengine.parameter_server.server.status.pages import ServerPages
from psengine.parameter_server.server.transport.shard_thread import ShardThread
from psengine.parameter_server.status_model import SnapshotStatus, WorkerTimes
from psengine.protocol.keys import read_token
from psengine.status_port.port import MAX_CONNECTIONS, MAX_REQUESTS, REQUEST_TIMEOUT_S, StatusPort

GRAFANA = Path(__file__).parents[3] / "deploy" / "prometheus" / "grafana.json"
TOKEN = "correct-horse-battery-staple"
ALLOWED = {"Authorization": f"Bearer {TOKEN}"}


def ask(url, path, method="GET", headers=None, host=None, body=None):
    """(code, headers, content) of one request, with whatever Host."""
    address = url.removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=10)
    try:
        connection.putrequest(method, path, skip_host=True)
        for one in [address] if host is None else host:
            connection.putheader("Host", one)
        for name, value in (headers or {}).items():
            connection.putheader(name, value)
        if body is not None:
            connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read().decode()
    finally:
        connection.close()


def act(url, path, headers=ALLOWED, **more):
    code, _, content = ask(url, f"/actions/{path}", "POST", headers, **more)
    return code, json.loads(content)


@pytest.fixture(scope="module")
def server():
    with running_server() as running:
        yield running


@pytest.fixture(scope="module")
def acting(tmp_path_factory):
    """A server with a token and snapshots."""
    folder = tmp_path_factory.mktemp("acting")
    with running_server(status_token=token_file(folder), snapshot_dir=folder / "s", snapshot_interval_s=0.0) as running:
        yield running


def token_file(folder, text=TOKEN + "\n", mode=0o600):
    path = folder / "token"
    path.touch(mode=mode)
    path.chmod(mode)
    path.write_text(text)
    return path


# ---- reading ---------------------------------------------------------------------------------------------------


def test_the_page_needs_nothing_from_elsewhere_and_runs_its_own_code_only(server):
    code, headers, page = ask(server.status_url, "/")
    assert (code, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert page == dashboard()[0].decode()
    policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
    assert policy["default-src"] == policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert policy["connect-src"] == "'self'"
    assert policy["img-src"] == "data:"
    for kind in ("script-src", "style-src"):
        assert re.fullmatch(r"'sha256-[A-Za-z0-9+/]{43}='", policy[kind])
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["X-Frame-Options"] == "DENY"
    assert not [name for name in headers if name.lower().startswith("access-control")]
    # Nothing that would turn a server's text into markup, and no address but namespaces.
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "setTimeout('", "srcdoc"):
        assert way not in page
    assert set(re.findall(r"https?://[^\"'\s)]+", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"\son[a-z]+=", page.split("<script>")[0])
    assert "style=" not in page.split("<script>")[0]


@pytest.mark.parametrize("host", ["127.0.0.1:1", "localhost", "LOCALHOST:65535", "[::1]:8000", "127.9.9.9"])
def test_names_of_this_machine_are_answered(server, host):
    assert ask(server.status_url, "/healthz", host=[host])[0] == 200


@pytest.mark.parametrize(
    "hosts",
    [
        ["evil.example"],
        ["evil.example:9100"],
        ["localhost.evil.example"],
        ["127.0.0.1.nip.io:9100"],
        ["127.0.0.1@evil.example"],
        ["0.0.0.0:9100"],
        ["10.0.0.5"],
        ["::1"],
        [""],
        [],
        ["localhost", "evil.example"],
    ],
)
def test_other_names_are_not(server, hosts):
    for path, method in (("/", "GET"), ("/status.json", "GET"), ("/actions/shutdown", "POST")):
        code, _, content = ask(server.status_url, path, method, host=hosts)
        assert code == 421, hosts
        assert "psengine-server" not in content
    assert server.is_alive


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/../etc/passwd", 404),
        ("GET", "/dashboard.html", 404),
        ("GET", "/healthz?x=1", 404),
        ("GET", "/history.json?resolution=7", 400),
        ("GET", "/history.json?resolution=", 400),
        ("GET", "/history.json?since=soon", 400),
        ("GET", "/history.json?since=nan", 400),
        ("GET", "/history.json?resolution=1&resolution=60", 400),
        ("GET", "/history.json?colour=red", 404),
        ("GET", "/history.json?x", 400),
        ("GET", "/history.json?" + "&".join(f"a{i}=1" for i in range(50)), 400),
        ("GET", "/actions/shutdown", 405),
        ("POST", "/", 405),
        ("POST", "/status.json", 405),
        ("OPTIONS", "/status.json", 501),
        ("PUT", "/actions/shutdown", 501),
        ("HEAD", "/status.json", 200),
    ],
)
def test_what_is_not_there_and_what_is_not_understood(server, method, path, code):
    assert ask(server.status_url, path, method)[0] == code
    assert "Traceback" not in server.log()


def idle_connections(url, count):
    host, _, port = url.removeprefix("http://").rpartition(":")
    return [socket.create_connection((host, int(port)), timeout=10) for _ in range(count)]


def test_connections_that_ask_nothing_keep_nobody_away():
    with monitor_of(server_status) as monitor, ExitStack() as open_ones:
        for begun in (b"", b"GET / HTTP/1.1\r\nHost: loc"):
            for connection in idle_connections(monitor.url, MAX_CONNECTIONS):
                open_ones.enter_context(connection)
                connection.sendall(begun)
            for _ in range(3):
                assert ask(monitor.url, "/healthz")[0] == 200


def test_health_is_answered_behind_any_number_of_readers():
    """As many requests as there are places are worked on, the others are refused."""
    at_work, may_end = threading.Semaphore(0), threading.Event()

    def status():
        at_work.release()
        assert may_end.wait(30)
        return server_status()

    with monitor_of(status) as monitor, ThreadPoolExecutor(MAX_REQUESTS) as pool:
        try:
            asked = [pool.submit(ask, monitor.url, "/status.json") for _ in range(MAX_REQUESTS)]
            for _ in range(MAX_REQUESTS):
                assert at_work.acquire(timeout=30)
            code, headers, content = ask(monitor.url, "/status.json")
            assert (code, headers["Retry-After"]) == (503, "1")
            assert "ask again" in content
            assert [ask(monitor.url, "/healthz")[0] for _ in range(30)] == [200] * 30
        finally:
            may_end.set()
        assert [future.result(30)[0] for future in asked] == [200] * MAX_REQUESTS
        assert ask(monitor.url, "/status.json")[0] == 200


@pytest.mark.parametrize("site", ["cross-site", "same-site", "anything"])
def test_pages_of_other_sites_get_nothing(acting, site):
    elsewhere = {"Sec-Fetch-Site": site, "Origin": "https://evil.example"}
    for method, path in (
        ("GET", "/history.json?resolution=60"),
        ("GET", "/status.json"),
        ("GET", "/metrics"),
        ("GET", "/healthz"),
        ("GET", "/?x"),
        ("POST", "/actions/shutdown"),
    ):
        code, _, content = ask(acting.status_url, path, method, {**elsewhere, **ALLOWED})
        assert code == 403, path
        assert "expected Sec-Fetch-Site: same-origin or none" in content
    assert acting.is_alive
    # A link may lead to the page, which knows nothing itself.
    assert ask(acting.status_url, "/", headers=elsewhere)[0] == 200


@pytest.mark.parametrize("path", ["/actions/shutdown", "/\x1b[31mOWNED"])
def test_bodies_that_never_come_are_waited_for_by_nobody(acting, path):
    """Nor do they leave a line in the log: whoever has no token could fill it."""
    before = acting.log()
    with idle_connections(acting.status_url, 1)[0] as connection:
        request = f"POST {path} HTTP/1.0\r\nHost: localhost\r\nContent-Length: 5\r\n\r\n"
        connection.sendall(request.encode("latin-1"))
        connection.settimeout(REQUEST_TIMEOUT_S - 1)
        code = connection.recv(12)
    assert code == (b"HTTP/1.0 401" if path.startswith("/actions/") else b"HTTP/1.0 405")
    assert acting.log() == before


@contextmanager
def monitor_of(status):
    """A status port of this process, over a server that is not there."""
    with StatusPort(0, ServerPages(status, lambda: True, History(status), actions_on())) as port:
        yield port


def actions_on(evict=lambda *_: False, drain=lambda: 0):
    return Actions(True, snapshot=None, evict=evict, forget=lambda job: None, drain=drain, shut_down=lambda: None)


# ---- metrics ---------------------------------------------------------------------------------------------------


TOLD = replace(TIMES, step_s=0.25, blocked_s=0.05, apply_s=0.01, held_s=0.01)


def status_with_everything(name="j", **changes):
    """A server with one worker of which all is known, 2 steps behind another."""
    snapshot = SnapshotStatus(
        directory="d", interval_s=1.0, generation=1, age_s=2.0, last_seconds=0.1, failures=0, last_error=""
    )
    workers = [
        worker(3, **{"clock": 12, "staleness": {"1": 9, "5": 1}, "telemetry": TOLD} | changes),
        worker(4, clock=14),
    ]
    counts = {"refused": {"non_finite": 2}, "staleness": {"0": 2, "64": 1}, "staleness_sum": 500}
    return server_status(shard(*workers, name=name, **counts), snapshot=snapshot)


def test_metrics_tell_of_workers():
    text = render_metrics(status_with_everything())[1].decode()
    for line in (
        'psengine_worker_step{training_job="j",worker="3"} 12.0',
        'psengine_worker_lag_steps{training_job="j",worker="3"} 2.0',
        'psengine_worker_loss{training_job="j",worker="3"} 0.25',
        'psengine_worker_step_seconds{training_job="j",worker="3"} 0.25',
        'psengine_worker_step_part_seconds{part="compute",training_job="j",worker="3"} 0.2',
        'psengine_worker_step_part_seconds{part="wire",training_job="j",worker="3"} 0.03',
        'psengine_worker_staleness{quantile="0.99",training_job="j",worker="3"} 5.0',
        'psengine_job_workers{state="live",training_job="j"} 2.0',
        'psengine_staleness_bucket{le="+Inf",shard="0",training_job="j"} 3.0',
        'psengine_staleness_sum{shard="0",training_job="j"} 500.0',
    ):
        assert line in text, text
    # Prometheus would rename it: the label is its own, of what it scrapes.
    assert not re.search(r"[{,]job=", text)


def test_what_is_not_known_of_a_worker_is_left_out():
    text = render_metrics(status_with_everything(clock=None, staleness={}, telemetry=WorkerTimes()))[1].decode()
    for name in ("step", "lag_steps", "loss", "step_seconds", "step_part_seconds", "staleness"):
        assert f'psengine_worker_{name}{{training_job="j",worker="3"' not in text
    assert 'psengine_worker_silent_seconds{training_job="j",worker="3"}' in text


def test_grafana_asks_only_for_metrics_there_are():
    text = render_metrics(status_with_everything())[1].decode()
    exported = set(re.findall(r"^(psengine_\w+?)(?:\{| )", text, re.MULTILINE))
    board = json.loads(GRAFANA.read_text())
    expressions = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    queries = [variable["query"]["query"] for variable in board["templating"]["list"] if variable["type"] == "query"]
    assert len(expressions) >= 12
    used = {name for text in [*expressions, *queries] for name in re.findall(r"psengine_\w+", text)}
    assert used - exported == set()
    # A worker that asks for weights alone is counted there too.
    assert all('reason!="abstained"' in text for text in expressions if "psengine_refused_total" in text)
    assert {"datasource", "job"} <= {variable["name"] for variable in board["templating"]["list"]}
    for text in [*expressions, *queries]:
        assert not re.search(r"[{,( ]job[=,)]", text), text  # Prometheus's own label, of what it scrapes
        # Each server tells of all workers: without this, two servers would make four of two.
        for match in re.finditer(r"psengine_(?:worker_|job_workers)", text):
            assert re.search(r"(max|min)( by \([a-z, ]+\))? ?\($", text[: match.start()]), text
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            legend = target["legendFormat"]
            assert "{{shard}}" not in legend or "{{instance}}" in legend
    for panel in board["panels"]:
        assert panel["type"] == "row" or panel["datasource"]["uid"] == "${datasource}"
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


# ---- actions ---------------------------------------------------------------------------------------------------


def test_without_a_token_nothing_can_be_done(server):
    for headers in ({}, ALLOWED, {"Authorization": "Bearer "}):
        code, answer = act(server.status_url, "shutdown", headers)
        assert code == 403
        assert "--status-token" in answer["error"]
    assert server.is_alive


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        f"Bearer {TOKEN}x",
        f"Bearer {TOKEN[:-1]}",
        f"Basic {TOKEN}",
        TOKEN,
        "Bearer \xff\xfe",
    ],
)
def test_who_does_not_know_the_token_is_refused(acting, authorization):
    headers = {} if authorization is None else {"Authorization": authorization.encode("latin-1")}
    code, answered, content = ask(acting.status_url, "/actions/shutdown", "POST", headers)
    assert (code, answered["WWW-Authenticate"]) == (401, "Bearer")
    assert TOKEN not in content
    assert acting.is_alive
    assert TOKEN not in acting.log()


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("nothing", 404),
        ("", 404),
        ("snapshot?x=1", 400),
        ("evict", 400),
        ("evict?job=job", 400),
        ("evict?job=job&worker=one", 400),
        ("evict?job=job&worker=-1", 400),
        ("evict?job=job&worker=99999999999999999999", 400),
        ("evict?job=job&worker=%D9%A3", 400),
        ("evict?job=job&worker=7", 404),
        ("evict?job=%00%3Cb%3E&worker=0", 404),
        ("forget", 400),
        ("forget?job=", 404),
        ("forget?job=%00%3Cb%3E", 404),
    ],
)
def test_actions_that_make_no_sense(acting, path, code):
    answered, content = act(acting.status_url, path)
    assert answered == code, content
    assert content["error"]


def test_a_snapshot_on_demand_and_the_end_of_a_lease(acting):
    assert acting.status()["can_act"] is True
    code, answer = act(acting.status_url, "snapshot")
    assert code == 409
    assert "no job with values" in answer["error"]
    with Peer(acting.addresses[0]) as peer:
        peer.make_job(torch.zeros(10))
        assert act(acting.status_url, "snapshot") == (
            200,
            {"generation": 1, "text": "Durable to generation 1."},
        )
        assert acting.status()["snapshot"]["generation"] == 1
        code, answer = act(acting.status_url, "evict?job=job&worker=0")
        assert code == 200
        job = acting.status()["jobs"]["job"]
        assert job["workers"] == []
        assert job["evicted"] == 1
        (gone,) = [event for event in acting.status()["events"] if event["kind"] == "evicted"]
        assert (gone["job"], gone["worker"]) == ("job", 0)
        assert "is out: its lease was ended by hand; the others go on without it" in acting.log()
        refused = peer.request("PUSH", key=0, sequence=1, payload=torch.ones(10))
        assert refused.body["code"] == "fenced"
        assert peer.hello().type.name == "WELCOME"  # and it comes back


def test_a_busy_shard_ends_the_lease_later(monkeypatch):
    """The deadline is one for all shards; who missed it still does what it was asked."""
    monkeypatch.setattr(shard_group, "ANSWER_DEADLINE_S", 0.05)
    shards = ShardGroup()
    worlds = [World(), World()]
    shards.threads = [ShardThread(world.shard, None, None) for world in worlds]  # not started: busy
    for world in worlds:
        team(world, 1, [spec(0, 4)])
    code, answer = actions_on(shards.evict).perform("evict", {"job": "demo", "worker": "0"})
    assert (code, set(answer)) == (202, {"text"})
    assert "busy" in answer["text"]
    for thread in shards.threads:
        monkeypatch.setattr(thread, "_send", lambda outgoing: None)
        thread._answer_asked()
    assert [world.shard.jobs.member_count for world in worlds] == [0, 0]


def test_a_drain_is_no_question_that_a_busy_shard_leaves_open(monkeypatch):
    monkeypatch.setattr(shard_group, "ANSWER_DEADLINE_S", 0.05)
    server = Server(ServerSettings())
    server._shards.threads = [ShardThread(World().shard, None, None)]  # not started: busy
    for _ in range(2):
        code, answer = actions_on(drain=server._drain).perform("drain", {})
        assert (code, "busy" in answer["text"]) == (202, True)
        assert server._is_draining
    (thread,) = server._shards.threads
    thread._answer_asked()
    assert thread.shard.is_closed
    assert [event.kind for event in server._events.events()] == ["draining"]


def test_a_token_without_a_port_is_not_needed(tmp_path, monkeypatch):
    """Servers that a training starts inherit the variable, and have nothing to use it for."""
    monkeypatch.setenv("PSENGINE_STATUS_TOKEN", str(tmp_path / "of-another-server"))
    with EmbeddedServer.start() as server:
        assert server.is_running


def test_a_shutdown_is_an_orderly_one(tmp_path):
    with running_server(status_token=token_file(tmp_path), snapshot_dir=tmp_path / "s") as server:
        with Peer(server.addresses[0]) as peer:
            peer.make_job(torch.zeros(10))
        assert act(server.status_url, "shutdown", body=b"")[0] == 202
        assert server.wait() == 0
        assert "durable to" in server.log()


# ---- the token -------------------------------------------------------------------------------------------------


def test_a_server_whose_token_others_can_read_does_not_start(tmp_path):
    path = token_file(tmp_path, mode=0o640)
    with pytest.raises(ServerFailedError, match=r"exit code 2(.|\n)*mode 0600"), running_server(status_token=path):
        pass


def test_a_token_is_one_word_of_some_length(tmp_path):
    assert read_token(token_file(tmp_path)) == TOKEN
    for text in ("", "short", "two words-of-good-length"):
        with pytest.raises(ConfigurationError, match=r"holds no token \(expected one word.*token_urlsafe"):
            read_token(token_file(tmp_path, text))
