"""tests/support/hosts.py itself: hosts see each other by name and nothing else, and nothing of them is left."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from support.hosts import emulated_hosts, missing_for_hosts, needs_hosts, run_together
from support.waiting import eventually

TESTS = Path(__file__).parents[1]
SERVER = """
import socket, sys
with socket.create_server((sys.argv[1], 0)) as listener:
    print(listener.getsockname()[1], flush=True)
    connection, (address, _) = listener.accept()
    connection.sendall(f"{address} came to {socket.gethostname()}".encode())
"""
CLIENT = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=10) as connection:
    print(connection.recv(100).decode())
"""


def script(text, *arguments):
    return [sys.executable, "-I", "-S", "-c", text, *map(str, arguments)]


def namespaces(pid):
    """The numbers of a host's own namespaces."""
    return {os.stat(f"/proc/{pid}/ns/{kind}").st_ino for kind in ("net", "uts", "ipc", "mnt", "pid")}


def namespaces_in_use():
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            found |= namespaces(process.name)
        except OSError:
            continue  # it ends meanwhile
    return found


@needs_hosts
def test_hosts_find_each_other_by_name():
    name = socket.gethostname()
    with emulated_hosts(3) as hosts:
        assert [host.name for host in hosts] == ["node-0", "node-1", "node-2"]
        with hosts[2].start(script(SERVER, hosts[2].address)) as server:
            server.wait_until(lambda: server.stdout.endswith("\n"))
            ended = hosts[0].run(script(CLIENT, "node-2", server.stdout.strip()))
            assert (ended.code, ended.stderr, server.wait()) == (0, "", 0)
        assert ended.stdout == f"{hosts[0].address} came to node-2\n"
        names = [each.stdout for each in run_together(hosts, lambda position: ["uname", "-n"])]
        assert names == ["node-0\n", "node-1\n", "node-2\n"]
    assert socket.gethostname() == name


@needs_hosts
def test_a_host_sees_no_process_socket_or_memory_of_another(tmp_path):
    (tmp_path / "told").write_text("everybody")
    hold = """
import os, socket, time
held = socket.socket(socket.AF_UNIX)
held.bind("\\0held")
held.listen()
for folder in ("/dev/shm", "/tmp", "/run"):
    open(f"{folder}/held", "w").close()
print(os.getpid(), flush=True)
time.sleep(60)
"""
    look = """
import os, socket, sys
print(sorted(name for name in os.listdir("/proc") if name.isdecimal() and int(name) not in (1, os.getpid())))
print([folder for folder in ("/dev/shm", "/tmp", "/run") if os.path.exists(f"{folder}/held")])
print(socket.socket(socket.AF_UNIX).connect_ex("\\0held") == 0, open(sys.argv[1]).read())
"""
    with emulated_hosts(2, shared=[tmp_path]) as (one, two), one.start(script(hold)) as holder:
        holder.wait_until(lambda: holder.stdout.endswith("\n"))
        number = holder.stdout.strip()
        # On its own host it is seen, so the other's answer means something.
        assert one.run(script(look, tmp_path / "told")).stdout.splitlines() == [
            f"['{number}']",
            "['/dev/shm', '/tmp', '/run']",
            "True everybody",
        ]
        assert two.run(script(look, tmp_path / "told")).stdout.splitlines() == ["[]", "[]", "False everybody"]
        assert not namespaces(one.pid) & namespaces(two.pid)
    assert not Path("/dev/shm/held").exists()


@needs_hosts
def test_codes_signals_and_deadlines_are_those_of_the_command():
    stubborn = "trap '' TERM; echo on; while :; do sleep 0.05; done"
    with emulated_hosts(1) as (host,):
        ended = host.run(["sh", "-c", "echo $GREETING; echo no >&2; exit 3"], environment={"GREETING": "yes"})
        assert (ended.code, ended.stdout, ended.stderr) == (3, "yes\n", "no\n")
        with host.start(["sleep", "60"]) as process:
            eventually(lambda: host.run(["pidof", "sleep"]).code == 0)
            process.signal(signal.SIGINT)
            assert process.wait(10) == -signal.SIGINT
        with pytest.raises(AssertionError, match=r"the command on node-0 still ran after 0\.3 s\non\n"):
            host.run(["sh", "-c", stubborn], deadline_s=0.3)
        with pytest.raises(AssertionError, match="still ran after"):
            run_together([host], lambda position: ["sleep", "60"], deadline_s=0.1)
        with pytest.raises(AssertionError, match="has ended with 4"), host.start(["sh", "-c", "exit 4"]) as process:
            process.wait_until(lambda: False)


@needs_hosts
def test_a_link_has_its_rate_in_both_directions():
    with emulated_hosts(1, rate="100mbit") as (host,):
        assert "tbf" in host.run(["tc", "qdisc", "show", "dev", "eth0"]).stdout
        assert "rate 100Mbit" in host.run(["tc", "qdisc", "show", "dev", "eth0"]).stdout
    with pytest.raises(RuntimeError, match="fast"), emulated_hosts(1, rate="fast"):
        pass


@needs_hosts
def test_nothing_is_left():
    links, mounts = Path("/sys/class/net"), Path("/proc/self/mounts")
    before = (sorted(os.listdir(links)), mounts.read_text())
    used = set()

    def leave_by_an_error():
        with emulated_hosts(2) as hosts:
            used.update(*(namespaces(host.pid) for host in hosts))
            hosts[0].start(["setsid", "sleep", "60"])
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        leave_by_an_error()
    assert len(used) == 10
    eventually(lambda: not used & namespaces_in_use(), "the namespaces' end")
    assert (sorted(os.listdir(links)), mounts.read_text()) == before


@needs_hosts
def test_nothing_is_left_when_the_test_is_killed():
    program = f"""
import sys, time
sys.path[:0] = [{str(TESTS)!r}, *{sys.path!r}]
from support.hosts import emulated_hosts
with emulated_hosts(2) as hosts:
    hosts[0].start(["setsid", "sleep", "60"])
    print(*(host.pid for host in hosts), flush=True)
    time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        try:
            used = set().union(*(namespaces(pid) for pid in process.stdout.readline().split()))
        finally:
            process.kill()
    assert len(used) == 10
    eventually(lambda: not used & namespaces_in_use(), "the namespaces' end")


def test_what_is_missing_is_named():
    program = f"""
import os, sys
sys.path[:0] = [{str(TESTS)!r}, *{sys.path!r}]
os.geteuid = lambda: 1000
from support.hosts import missing_for_hosts
print(missing_for_hosts())
missing_for_hosts.cache_clear()
os.geteuid = lambda: 0
os.environ["PATH"] = "/nonexistent"
print(missing_for_hosts())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines() == [
        "emulated hosts need root (expected user 0, got 1000)",
        "emulated hosts need the program unshare (Debian's package util-linux)",
    ]
    with pytest.raises(ValueError, match="expected 1 to 200 hosts, got 0"), emulated_hosts(0):
        pass
    if (missing := missing_for_hosts()) is not None:
        with pytest.raises(RuntimeError, match=missing[:20]), emulated_hosts(1):
            pass


# Sends messages to itself through an echo on another host, prints (seconds of a small one, bytes a second of a large).
ECHO = """
import socket
with socket.create_server(("", 7000)) as listener:
    print("ready", flush=True)
    while True:
        connection, _ = listener.accept()
        with connection:
            while data := connection.recv(65536):
                connection.sendall(data)
"""
ASK = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 7000), timeout=20) as connection:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    for _ in range(int(sys.argv[2])):
        begin = time.monotonic()
        connection.sendall(b"x")
        assert connection.recv(1) == b"x"
        print(time.monotonic() - begin, flush=True)
        time.sleep(0.02)
"""


@needs_hosts
@pytest.mark.slow
@pytest.mark.parametrize("round_trip_s", [0.0, 0.02], ids=["bridge", "relay"])
def test_a_link_that_is_cut_loses_packets_until_it_is_mended(round_trip_s):
    rate = "10mbit" if round_trip_s else None
    with (
        emulated_hosts(2, rate=rate, round_trip_s=round_trip_s) as (one, two),
        one.start(script(ECHO)) as echo,
    ):
        echo.wait_until(lambda: echo.stdout == "ready\n")
        with two.start(script(ASK, one.name, 15)) as asking:
            asking.wait_until(lambda: asking.stdout.count("\n") >= 2)
            # A round trip is never shorter than the delay; by how much it is longer says nothing.
            assert all(float(line) >= round_trip_s for line in asking.stdout.split())
            one.cut()
            ended = two.run(script("import socket; socket.create_connection(('node-0', 7000), timeout=0.3)"))
            assert "timed out" in ended.stderr or "No route to host" in ended.stderr
            one.mend()
            assert asking.wait() == 0, asking.stderr
            assert asking.stdout.count("\n") == 15


def test_a_delay_needs_a_rate_that_the_relay_can_carry():
    for rate, round_trip_s in ((None, 0.02), ("1gbit", 0.02), ("200mbit", 0.02), ("10mbit", -1.0)):
        hosts = emulated_hosts(2, rate=rate, round_trip_s=round_trip_s)
        with pytest.raises(ValueError, match="links with a delay need a rate"), hosts:
            pass


@needs_hosts
def test_the_folder_of_a_killed_test_is_removed_by_the_next(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, fresh = tmp_path / "psengine-hosts-left", tmp_path / "psengine-hosts-fresh"
    left.mkdir()
    fresh.mkdir()
    os.utime(left, (1, 1))
    with emulated_hosts(1):
        own = set(tmp_path.iterdir()) - {fresh}
        assert len(own) == 1
        os.utime(next(iter(own)), (1, 1))
        with emulated_hosts(1):
            assert own < set(tmp_path.iterdir()), "a living test keeps its folder, however old"
    assert list(tmp_path.iterdir()) == [fresh]
