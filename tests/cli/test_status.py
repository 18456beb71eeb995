"""``psengine status`` and ``psengine top``, against servers with clients that train, stop and die."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import socket
import struct
import sys
import termios
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial

import pytest
import torch
from rich.console import Console
from support.mute_shards import mute_while
from support.server_process import running_server
from support.statuses import TIMES, departed, server, shard, worker
from support.waiting import eventually
from support.web_pages import web_page

import psengine
from psengine.cli import status_http
from psengine.cli.main import main
from psengine.cli.status_overview import ServerReport, merge
from psengine.cli.status_reading import NoStatusError, read_status
from psengine.cli.status_sources import open_sources
from psengine.cli.status_table import BAR_WIDTH, jobs_view, servers_table, time_bar
from psengine.cli.top import Watch
from psengine.parameter_server.server.transport.authentication import keygen
from psengine.parameter_server.status_model import Event, LogStatus, MuteShard, to_json
from psengine.protocol.messages import DURABILITY_TIERS


def exit_code(arguments):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return end.value.code or 0


def status_of(capsys, *arguments):
    """Exit code and JSON of ``psengine status``."""
    capsys.readouterr()
    code = exit_code(["status", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


@contextmanager
def training_client(address, *, job="default", steps=3, optimizer=True, rank=0):
    """A worker that has made ``steps`` exchanges, and lives."""
    weights = {"weight": torch.ones(1000)}
    with psengine.connect(address, job=job, rank=rank) as client:
        client.register(weights, torch.optim.SGD(list(weights.values()), lr=0.1) if optimizer else None)
        for _ in range(steps):
            client.push_pull({"weight": torch.ones(1000)}, into=weights)
        yield client


@contextmanager
def greeter(words):
    """What says something at once, and is no web server."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def greet():
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(words)
                    connection.recv(4096)

        thread = threading.Thread(target=greet)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(timeout=10)


def free_address():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{taken.getsockname()[1]}"


# ---- status --------------------------------------------------------------------------------------------------------


def test_jobs_of_both_kinds_over_both_protocols(capsys, monkeypatch):
    with running_server(shards=2) as server:
        monkeypatch.setenv("PSENGINE_SERVERS", server.addresses[0])
        code, before = status_of(capsys)
        assert (code, before["healthy"], before["jobs"]) == (0, True, {})
        assert exit_code(["status"]) == 0
        assert "no job to show" in capsys.readouterr().out
        with (
            training_client(server.addresses[0], steps=3),
            training_client(server.addresses[0], job="averaging", steps=2, optimizer=False),
        ):
            code, by_protocol = status_of(capsys)
            assert (code, by_protocol["problems"]) == (0, [])
            _, by_http = status_of(capsys, "--server-address", server.status_url)
            # The second shard's address leads to the same shards.
            _, twice = status_of(capsys, "--server-address", f"{server.addresses[0]},{server.status_url}")
            for found in (by_protocol, by_http, twice):
                job, averaging = found["jobs"]["default"], found["jobs"]["averaging"]
                assert (job["kind"], job["applied"], job["members"]) == ("async", 3, 1)
                assert (averaging["kind"], averaging["averaged"]) == ("sync-server", 2)
                (worker,) = job["workers"]
                assert (worker["rank"], worker["step"], worker["pid"]) == (0, 3, os.getpid())
                # Registered once, pushed thrice; two pushes of the other job.
                moved = sum(shard["bytes_in"] for shard in by_protocol["servers"][0]["shards"])
                assert moved == sum(j["bytes_in"] for j in found["jobs"].values())
            assert {event["kind"] for event in by_http["events"]} >= {"started", "joined"}
            assert by_http["servers"][0]["pid"] == server.pid
            monkeypatch.setenv("COLUMNS", "80")
            assert exit_code(["status", "--job", "averaging"]) == 0
            out = capsys.readouterr().out
            assert re.search(r"job averaging +sync-server +1 worker ", out)
            assert "job default" not in out
            assert re.search(r"^ +0 +live +2 +0 ", out, re.MULTILINE)
            assert exit_code(["status", "--job", "other"]) == 1
            assert "there is no job 'other'" in capsys.readouterr().out


def test_a_server_that_is_away_is_named_and_the_others_are_shown(capsys):
    dead = free_address()
    with running_server() as server, training_client(server.addresses[0]):
        code, found = status_of(capsys, "--server-address", f"{dead},{server.addresses[0]}", "--timeout-s", "2")
        assert code == 1
        assert found["healthy"] is False
        assert [entry["reachable"] for entry in found["servers"]] == [False, True]
        assert found["jobs"]["default"]["applied"] == 3
        (problem,) = found["problems"]
        assert dead in problem
        assert "did not answer HELLO for 2" in problem
        assert "--timeout-s of a command" in problem
    code, found = status_of(capsys, "--server-address", server.status_url, "--timeout-s", "0.5")
    assert code == 1
    assert "refused" in found["problems"][0]


def test_keys_come_from_the_environment(capsys, tmp_path, monkeypatch):
    server_key, server_public = keygen(tmp_path / "server", "server")
    client_key, _ = keygen(tmp_path / "clients", "me")
    with running_server(curve_key=server_key, allow=tmp_path / "clients") as server:
        code, found = status_of(capsys, "--server-address", server.addresses[0])
        assert code == 1
        assert "CURVE keys" in found["problems"][0]
        monkeypatch.setenv("PSENGINE_SERVER_KEY", str(server_public))
        assert exit_code(["status", "--server-address", server.addresses[0]]) == 2
        assert "CURVE needs both keys" in capsys.readouterr().err
        monkeypatch.setenv("PSENGINE_CLIENT_KEY", str(client_key))
        assert status_of(capsys, "--server-address", server.addresses[0])[0] == 0


@pytest.mark.parametrize(
    ("content", "code", "words"),
    [
        (b"<html>", 200, "no status page of a psengine-server"),
        (b'{"shards": 3}', 200, "no status page of a psengine-server"),
        (b"nothing here", 404, "answers 404"),
        (b'{"healthy": true, "shards": [{"jobs": {"a": {}}}]}', 200, "install the same version"),
        (b"[" * 100_000, 200, "no status page of a psengine-server"),
    ],
)
def test_a_page_that_is_no_status(content, code, words, capsys):
    with web_page(content, code) as url:
        exit, found = status_of(capsys, "--server-address", url)
        assert exit == 1
        assert words in found["problems"][0]
        # In a thread of its own, whose end nobody would see.
        assert exit_code(["top", "--server-address", url, "--once"]) == 1
    captured = capsys.readouterr()
    assert words in re.sub(r"\s+", " ", captured.out)
    assert "Traceback" not in captured.err


NOT_SHOWN = ["many", "[/x]", [1], {}, float("nan"), 1e300, 10**400]


@pytest.mark.parametrize(
    "place",
    [
        *("uptime_s", "unix_s", "shards/0/memory_bytes", "shards/0/unix_s", "events/0/unix_s"),
        *("job/bytes_in", "job/version_max", "job/chunks", "job/expected_workers", "job/refused/x", "job/staleness/1"),
        *("job/workers/0/rank", "job/workers/0/silent_s", "job/workers/0/clock", "job/workers/0/waiting_for/0"),
        *("job/workers/0/telemetry/step_s", "job/departed/0/unix_s", "job/departed/0/rank"),
    ],
)
def test_what_is_shown_as_a_number_is_one(place):
    for value in NOT_SHOWN:
        page = page_with_a_job(telemetry=TIMES, waiting_for=(1,))
        assert read_status(page, "http://a").events
        *path, name = place.replace("job", "shards/0/jobs/a-job", 1).split("/")
        entry = page
        for step in path:
            entry = entry[int(step) if isinstance(entry, list) else step]
        entry[int(name) if isinstance(entry, list) else name] = value
        with pytest.raises(NoStatusError, match="install the same version on both sides"):
            read_status(page, "http://a")


def test_names_are_no_markup(capsys):
    markup = "[/x][red]"
    mute = MuteShard(index=1, error=markup)
    page = page_with_a_job(markup, mute=mute, event=Event(1.0, "joined", markup, 0, markup))
    with web_page(json.dumps(page).encode()) as url:
        for command in (["status"], ["top", "--once"]):
            assert exit_code([*command, "--server-address", url]) == 1
            assert capsys.readouterr().out.count(markup) >= 4


def test_what_speaks_no_http_is_told(capsys):
    with greeter(b"SSH-2.0-OpenSSH_9.6\x1b[2J\r\n") as url:
        code, found = status_of(capsys, "--server-address", url)
        assert code == 1
        assert "no HTTP came back (SSH-2.0-OpenSSH_9.6\\x1b[2J)" in found["problems"][0]
        # In a thread of its own, whose end nobody would see.
        assert exit_code(["top", "--server-address", url, "--once"]) == 1
    captured = capsys.readouterr()
    assert "no HTTP came back" in captured.out
    assert "Traceback" not in captured.err


def test_why_a_page_is_refused(capsys, monkeypatch):
    with running_server() as server:
        # Another name than loopback's, as through a tunnel that somebody named.
        code, found = status_of(capsys, "--server-address", server.status_url.replace("127.0.0.1", "0.0.0.0"))
        assert code == 1
        assert "answers 421" in found["problems"][0]
        assert "It says: this port answers to 127.0.0.1, localhost and [::1] alone" in found["problems"][0]
        monkeypatch.setattr(status_http, "MAX_PAGE_BYTES", 10)
        _, found = status_of(capsys, "--server-address", server.status_url)
        assert "its page is too long (expected at most 10 bytes)" in found["problems"][0]


def test_a_shard_that_does_not_answer_is_not_an_absent_job(capsys, tmp_path):
    flag = tmp_path / "mute"
    with (
        running_server(sabotage=partial(mute_while, flag)) as server,
        training_client(server.addresses[0]),
        Watch(open_sources(server.status_url, 5.0), 0.02) as watch,
    ):

        def look_for(*, mute):
            deadline_s = time.monotonic() + 20.0
            while not watch.polls or bool(watch.look().overview.reports[0].status.mute) is not mute:
                assert time.monotonic() < deadline_s
                time.sleep(0.02)
            return watch.look()

        assert "default" in look_for(mute=False).overview.jobs
        flag.touch()
        assert look_for(mute=True).overview.jobs == {}
        code, found = status_of(capsys, "--server-address", server.status_url, "--job", "default")
        assert code == 1
        assert found["problems"] == [f"{server.status_url}: shard 0 does not answer: no answer within 0.2 s"]
        assert found["servers"][0]["shards"] == [{"index": 0, "error": "no answer within 0.2 s"}]
        assert exit_code(["status", "--server-address", server.status_url]) == 1
        out = capsys.readouterr().out
        assert "which jobs there are is not known" in out
        assert re.search(r" 0 +does not answer", out)
        flag.unlink()
        assert "default" in look_for(mute=False).overview.jobs
        assert [event.text for event in watch.look().events if event.kind == "restarted"] == []


@pytest.mark.parametrize("command", ["status", "top"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no server is named"),
        (["--server-address", "a:7077"], "malformed"),
        (["--server-address", "a:7077"], "asked as http://host:port"),
        (["--server-address", "http://:9100"], "malformed"),
        (["--server-address", "http://a:b"], "malformed"),
        (["--server-address", "tcp://a:7077", "--timeout-s", "soon"], "timeout-s"),
        (["--server", "tcp://a:7077"], "No such option"),
    ],
)
def test_wrong_arguments_are_one_message_and_code_2(command, arguments, words, capsys, monkeypatch):
    monkeypatch.delenv("PSENGINE_SERVERS", raising=False)
    assert exit_code([command, *arguments, *(["--once"] if command == "top" else [])]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


# ---- tables --------------------------------------------------------------------------------------------------------


def shard_with_a_job(name="a-job", **changes):
    """A shard with two workers and one that is gone."""
    common = {"host": "a-host-with-a-long-name.example", "pid": 4711, "silent_s": 0.5, "staleness": {"1": 5, "3": 1}}
    workers = [
        worker(rank, **common | {"clock": clock, "pushes": clock} | changes) for rank, clock in ((0, 120), (1, 100))
    ]
    gone = departed(2, host="b", reason="evicted", unix_s=time.time() - 60, step=7)
    counters = {"applied": 100, "duplicates": 1, "late": 2, "non_finite": 3, "evicted": 1, "max_staleness": 2}
    counts = {"refused": {"not_finite": 3, "abstained": 7}, "staleness": {"0": 1, "2": 9}}
    rule = {"name": "apply", "max_staleness": 4}
    return shard(*workers, name=name, rule=rule, expected_workers=3, departed=(gone,), **counters, **counts)


CAME = Event(1.0, "joined", "a-job", 0, "came")


def page_with_a_job(name="a-job", mute=None, event=CAME, **changes):
    """It, on the page of a server."""
    shards = [shard_with_a_job(name, **changes), *([mute] if mute else [])]
    return json.loads(json.dumps(to_json(server(*shards, events=(event,), unix_s=61.0))))


def overview(status=None, **changes):
    """It, merged as in life."""
    address = "tcp://a-server-with-a-long-name.example:7077"
    return merge([ServerReport(address=address, status=status or server(shard_with_a_job(**changes)))])


def drawn(renderable, width, **options):
    console = Console(width=width, force_terminal=False, **options)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_tables_fit_and_wide_ones_say_more(width):
    shown = overview()
    text = drawn(servers_table(shown.reports, width), width) + drawn(jobs_view(shown, width), width)
    assert max(map(len, text.splitlines())) <= width
    assert "2 of 3 workers" in text
    assert "refused 3 (3 not_finite)" in re.sub(r"\s+", " ", text)
    assert "worker 2 on b is gone: evicted after step 7, 60s ago" in text
    header = next(line for line in text.splitlines() if line.startswith("rank"))
    for title in ("state", "step", "lag", "heard"):
        assert title in header
    assert "lag" in header
    assert ("samples/s" in header) == (width == 200)
    assert re.search(r"^ +1 +live .*\b20\b", text, re.MULTILINE)  # 20 steps behind


def test_what_a_server_says_moves_no_cursor(capsys):
    evil = "\x1b[2J\x9b1A\r\n\u202e"
    page = page_with_a_job(
        "job" + evil,
        mute=MuteShard(index=1, error="error" + evil),
        event=Event(1.0, "joined", "job" + evil, 0, "event" + evil),
        host="host" + evil,
        state="silent",
    )
    (job,) = page["shards"][0]["jobs"].values()
    job["departed"][0] |= {"host": "gone" + evil, "reason": "why" + evil}
    job["refused"] = {"reason" + evil: 1}
    with web_page(json.dumps(page).encode()) as url:
        assert exit_code(["status", "--server-address", url]) == 1
        assert exit_code(["top", "--server-address", url, "--once"]) == 1
        out = capsys.readouterr().out
    for word in ("job", "gone", "why", "reason", "event", "error"):
        assert out.count(word + r"\x1b[2J\x9b1A\r\n\u202e") >= 2, out
    assert all(line.isprintable() for line in out.split("\n"))


def test_ascii_is_enough():
    times = replace(TIMES, step_s=0.1, blocked_s=0.05, apply_s=0.01, held_s=0.02)
    text = drawn(jobs_view(overview(telemetry=times), 200, ascii_only=True), 200)
    assert text.replace("…", "").isascii(), text  # rich's own, of a name that is too long
    assert "######...---+" in text  # half of it computes, a fifth waits, a fifth travels, a tenth is applied


def test_a_step_is_cut_in_proportion():
    (told, *_) = overview().jobs["a-job"].workers
    times = replace(told, compute_s=0.06, wait_s=0.0, wire_s=0.03, apply_s=0.01)
    assert time_bar(times, ascii_only=True, width=10).plain == "######---+"
    assert len(time_bar(times).plain) == BAR_WIDTH
    assert time_bar(told).plain == "-"
    assert time_bar(replace(told, compute_s=1e-9)).plain == "█" * BAR_WIDTH


@pytest.mark.parametrize(
    ("loss", "in_json", "in_table"),
    [("nan", "nan", "nan"), (None, None, "-"), (0.5, 0.5, "0.5"), (1e30, 1e30, "1e+30")],
)
def test_a_loss_that_is_not_finite_is_none_that_is_not_there(loss, in_json, in_table):
    page = page_with_a_job(telemetry=replace(TIMES, loss=loss))
    told = overview(read_status(page, "http://a"))
    text = json.dumps(told.to_json(), allow_nan=False)
    shown = json.loads(text)["jobs"]["a-job"]["workers"][0]
    assert (shown["loss"], shown["compute_s"]) == (in_json, 0.2)
    row = next(line for line in drawn(jobs_view(told, 80), 80).splitlines() if line.startswith("   0"))
    assert row.split()[7] == in_table


def test_a_silent_worker_is_a_problem():
    assert overview().problems == []
    assert overview(state="silent").problems == ["job 'a-job': nothing was heard of worker 0, 1"]


@pytest.mark.parametrize("tier", [*DURABILITY_TIERS, None])
def test_the_tier_of_durability_is_in_the_tables(tier, capsys):
    told = server(replace(shard_with_a_job(), durability=tier), durability=tier)
    with web_page(json.dumps(to_json(told)).encode()) as url:
        for command in (["status"], ["top", "--once"]):
            assert exit_code([*command, "--server-address", url]) == 0
            header, row = re.search(r"^(server .*)\n(http.*)$", capsys.readouterr().out, re.MULTILINE).groups()
            assert row[header.index("durability") :].split()[0] == (tier or "-")
    for width in (60, 80):
        assert (tier or "-") in drawn(servers_table(overview(told).reports, width), width)


def test_a_log_without_room_is_a_problem(capsys):
    log = LogStatus(
        shard=0, records=3, durable_records=2, written_bytes=9, syncs=1, sync_seconds=0.1, is_full=True, error=""
    )
    with web_page(json.dumps(to_json(server(shard_with_a_job(), logs=(log,)))).encode()) as url:
        for command in (["status"], ["top", "--once"]):
            assert exit_code([*command, "--server-address", url]) == 1
            shown = re.sub(r"\s+", " ", capsys.readouterr().out)
            assert "the disk of shard 0's log is full: nothing is acknowledged until there is room" in shown


# ---- top -----------------------------------------------------------------------------------------------------------


def test_frames_without_a_terminal(capsys):
    with running_server() as server, training_client(server.addresses[0], steps=1) as client:
        stop = threading.Event()

        def push():
            while not stop.is_set():
                client.push_pull({"weight": torch.ones(1000)})

        pusher = threading.Thread(target=push)
        pusher.start()
        try:
            arguments = ["top", "--server-address", server.addresses[0], "--interval-s", "0.2", "--iterations", "3"]
            assert exit_code(arguments) == 0
        finally:
            stop.set()
            pusher.join(timeout=10)
        frames = capsys.readouterr().out.split("psengine top")[1:]
        assert len(frames) == 3
        rates = re.search(r"127\.0\.0\.1:\d+ +0 .*?(\S+) +(\S+)\s*$", frames[-1], re.MULTILINE)
        assert rates is not None, frames[-1]
        assert float(rates[1]) > 0
        assert float(rates[2]) > 0
    assert exit_code(["top", "--server-address", server.addresses[0], "--once", "--timeout-s", "0.3"]) == 1
    assert "0 of 1 server answering" in capsys.readouterr().out


def test_no_terminal_to_live_on(capsys):
    assert exit_code(["top", "--server-address", "tcp://127.0.0.1:7077"]) == 2
    assert "psengine status" in capsys.readouterr().err


class Terminal:
    """``psengine top`` on a terminal of 80 columns."""

    def __init__(self, arguments):
        self.pid, self._descriptor = pty.fork()
        if self.pid == 0:
            os.environ.update(TERM="xterm", OMP_NUM_THREADS="1")
            os.execv(sys.executable, [sys.executable, "-m", "psengine.cli.main", "top", *arguments])
        fcntl.ioctl(self._descriptor, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        self._text = ""
        self._is_over = False

    def wait_for(self, words, timeout_s=30.0):
        """Read until the newest frame has these words."""
        deadline_s = time.monotonic() + timeout_s
        while not re.search(words, self.screen()):
            in_time = time.monotonic() < deadline_s and not self._is_over
            assert in_time, f"no {words!r} in:\n{self.screen()}"
            self._read(0.2)

    def screen(self):
        """The newest frame, without colours."""
        frame = self._text.rpartition("psengine top")[2]
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", frame)

    def press(self, keys):
        os.write(self._descriptor, keys)

    def end(self, timeout_s=15.0):
        """Exit code, and everything that was drawn."""
        deadline_s = time.monotonic() + timeout_s
        while not self._is_over and time.monotonic() < deadline_s:
            self._read(0.2)
        while time.monotonic() < deadline_s:
            pid, state = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                return os.waitstatus_to_exitcode(state), self._text
            time.sleep(0.02)
        raise AssertionError(f"it still ran after {timeout_s:g} s")

    def _read(self, timeout_s):
        if select.select([self._descriptor], [], [], timeout_s)[0]:
            try:
                data = os.read(self._descriptor, 65536)
            except OSError:
                data = b""
            self._text += data.decode(errors="replace")
            self._is_over = not data

    def close(self):
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._descriptor)


def test_servers_that_go_and_come_back_are_told():
    # The second server outlives the watch, which says goodbye to it.
    with running_server() as first, ExitStack() as later:
        address = first.addresses[0]
        with Watch(open_sources(f"{address},{first.status_url}", 0.3), 0.05) as watch:

            def wait_for(*, answering):
                eventually(lambda: [not report.error for report in watch.look().overview.reports] == answering)

            wait_for(answering=[True, True])
            first.kill()
            wait_for(answering=[False, False])
            later.enter_context(running_server(bind=address))
            wait_for(answering=[True, False])
            told = [(event.kind, event.text) for event in watch.look().events]
    assert ("back", f"{address} answers again") in told
    # On a busy machine it may have been away more than once.
    kinds = [kind for kind, text in told if text.startswith(address)]
    assert kinds == ["gone", "back"] * (len(kinds) // 2)
    assert any(kind == "gone" and text.startswith(first.status_url) for kind, text in told)


@pytest.mark.slow
def test_the_live_view_outlives_its_server(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    with running_server() as first:
        address = first.addresses[0]
        top = Terminal(["--server-address", address, "--interval-s", "0.1", "--timeout-s", "0.5"])
        try:
            with training_client(address, steps=4):
                top.wait_for(r"1 of 1 server answering")
                top.wait_for(r"(?m)^ *0 +live +4 ")
            first.kill()
            top.wait_for(r"0 of 1 server answering")
            top.wait_for(r"does not answer")
            with running_server(bind=address) as second:
                top.wait_for(r"1 of 1 server answering")
                top.wait_for(r"answers again")
                assert second.is_alive
                top.press(b"q")
                code, text = top.end()
        finally:
            top.close()
    assert code == 0
    assert text.count("\x1b[?1049h") == text.count("\x1b[?1049l") == 1  # the screen of before is back
    assert "Traceback" not in text
    assert all(len(line) <= 80 for line in top.screen().splitlines())


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ctrl-c", "sigterm"])
def test_other_ways_to_end_the_live_view(how):
    with running_server() as server:
        top = Terminal(["--server-address", server.status_url])
        try:
            top.wait_for(r"1 of 1 server answering")
            if how == "ctrl-c":
                top.press(b"\x03")
            else:
                os.kill(top.pid, signal.SIGTERM)
            code, text = top.end()
        finally:
            top.close()
    assert code == (0 if how == "ctrl-c" else 128 + signal.SIGTERM)
    assert "\x1b[?1049l" in text
    assert "Traceback" not in text
