"""``psengine doctor``: conditions are provoked for real, in processes, namespaces and servers of our own."""

import ctypes
import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import run_ranks
from support.server_process import running_server

import psengine
from psengine.cli import doctor, doctor_checks
from psengine.cli.doctor_checks import CheckContext

PACKAGE = Path(psengine.__file__).parent


def run_check(check, variables=None, **context):
    return list(check(CheckContext(variables=variables or {}, **context)))


def test_the_whole_report_of_a_machine_with_three_mistakes():
    program = (
        "import sys\n"
        "sys.modules['psengine._native'] = None\n"  # as where it was never built
        "from psengine.cli.main import main\n"
        "main(['doctor', '--json'])\n"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "abc", "PSENGINE_STRATGY": "async", "RANK": "0"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    by_check = {finding["check"]: finding for finding in report["findings"]}
    assert list(by_check) == list(doctor.CHECKS)
    assert "itself failed" not in done.stdout
    assert all(finding["fix"] or finding["level"] in ("ok", "note") for finding in report["findings"])
    problems = [finding["check"] for finding in report["findings"] if finding["level"] == "problem"]
    assert {"threads", "launcher", "variables"} <= set(problems)
    assert report["counts"]["problem"] == len(problems)
    assert by_check["native-extension"]["level"] == "warning"
    assert by_check["variables"]["fix"] == "Did you mean PSENGINE_STRATEGY?"
    # The trial's processes have the extension.
    assert "shared memory sum 4 MiB in" in by_check["exchange"]["text"]


def test_a_check_that_fails_or_hangs_is_a_finding(monkeypatch):
    def fails(context):
        raise KeyError("missing")
        yield

    def hangs(context):
        yield doctor_checks.Finding("ok", "this far")
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM).recv(1)

    monkeypatch.setattr(doctor_checks, "versions", fails)
    (finding,) = doctor_checks.examine("versions", CheckContext(variables={}))
    assert (finding.level, "KeyError" in finding.text) == ("warning", True)
    monkeypatch.setattr(doctor_checks, "versions", hangs)
    monkeypatch.setattr(doctor_checks, "CHECK_DEADLINE_S", 0.2)
    first, second = doctor_checks.examine("versions", CheckContext(variables={}, timeout_s=0))
    assert (first.text, second.level) == ("this far", "problem")


def test_threads(monkeypatch):
    for text in ("abc", "0"):
        (finding,) = run_check(doctor_checks.threads, {"OMP_NUM_THREADS": text})
        assert finding.level == "problem"
        assert re.search(r"OMP_NUM_THREADS=\d+", finding.fix)
    cores = len(os.sched_getaffinity(0))
    monkeypatch.setattr(doctor_checks.torch, "get_num_threads", lambda: cores)
    (finding,) = run_check(doctor_checks.threads, {"OMP_NUM_THREADS": str(cores), "LOCAL_WORLD_SIZE": "2"})
    assert finding.level == "warning"
    assert f"ranks here: 2, threads of each: {cores}" in finding.text
    (finding,) = run_check(
        doctor_checks.threads, {"OMP_NUM_THREADS": "0", "PSENGINE_STRATEGY": "sync:virtual_workers=999"}
    )
    assert finding.fix == "set OMP_NUM_THREADS=1"


def _hostnames(rank, world_size):
    """In a namespace of our own; None where that is not allowed."""
    new_user, new_names = 0x10000000, 0x04000000
    if ctypes.CDLL(None, use_errno=True).unshare(new_user | new_names) != 0:
        return None
    found = []
    for name in ("nowhere.invalid", "localhost"):
        socket.sethostname(name)
        for variables in ({}, {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}):
            found += run_check(doctor_checks.hostname, variables)
    return found


def test_a_hostname_that_other_hosts_do_not_reach():
    (found,) = run_ranks(_hostnames, 1, init_group=False)
    if found is None:
        pytest.skip("user namespaces are not allowed here")
    assert [finding.level for finding in found] == ["note", "problem", "note", "problem"]
    assert "nowhere.invalid, resolves to nothing" in found[0].text
    assert all("GLOO_SOCKET_IFNAME" in finding.fix for finding in found)


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("given", "level", "words"),
    [
        ({}, "ok", "launcher: none"),
        ({"RANK": "0"}, "problem", "missing WORLD_SIZE"),
        ({**TORCHRUN, "MASTER_ADDR": "localhost"}, "ok", "rank 1 of 2"),
        ({**TORCHRUN, "MASTER_ADDR": "nowhere.invalid"}, "problem", "nowhere.invalid does not resolve"),
        ({"PSENGINE_WORKER": "2", "PSENGINE_WORKERS": "2"}, "problem", "below PSENGINE_WORKERS=2"),
    ],
)
def test_what_launchers_set(given, level, words):
    (finding,) = run_check(doctor_checks.launcher, given)
    assert finding.level == level
    assert words in finding.text


def test_known_variables_are_those_that_the_source_names():
    named = set()
    for path in PACKAGE.rglob("*.py"):
        if path.name != "doctor_checks.py":
            named.update(re.findall(r"\bPSENGINE_[A-Z_]*[A-Z]\b", path.read_text()))
    assert named <= {*doctor_checks.known_names()}
    values = {"PSENGINE_STRATEGY": "async:max_staleness=4", "PSENGINE_LEASE_S": "5", "PSENGINE_JOB": "mine"}
    assert [finding.level for finding in run_check(doctor_checks.variables, values)] == ["ok"]


def test_a_server_is_reached_and_measured():
    with running_server(shards=2) as server:
        address = server.addresses[0].replace("127.0.0.1", "localhost")
        (finding,) = run_check(doctor_checks.servers, servers=address)
        assert finding.level == "note"  # durability memory
        assert f"psengine-server {psengine.__version__} with 2 shards, without keys" in finding.text
        assert server.status()["shards"][0]["jobs"] == {}  # it looked, and changed nothing


def test_servers_that_are_not_there():
    with socket.create_server(("127.0.0.1", 0)) as mute, socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # not listening
        ports = [one.getsockname()[1] for one in (mute, taken)]
        named = ",".join([*(f"tcp://127.0.0.1:{port}" for port in ports), "tcp://nowhere.invalid:7077", "a:7077"])
        found = run_check(doctor_checks.servers, {"PSENGINE_SERVERS": named}, timeout_s=0.5)
    assert [finding.level for finding in found] == ["problem"] * 4
    assert all(finding.fix for finding in found)
    assert "did not answer RESUME" in found[0].text
    assert "does not resolve" in found[2].text
    assert "malformed" in found[3].text


def test_an_interface_for_gloo_that_is_not_there(monkeypatch):
    several_hosts = {"GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}
    for given, level in (({"GLOO_SOCKET_IFNAME": "lo"}, "ok"), (several_hosts, "problem")):
        (finding,) = run_check(doctor_checks.hostname, given)
        assert (finding.level, "lo" in finding.text) == (level, True)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    (finding,) = run_check(doctor_checks.exchange)
    assert finding.level == "problem"
    assert "nope0" in finding.text
