"""``psengine doctor``: conditions are provoked for real, in processes, namespaces and servers of our own."""

from __future__ import annotations

import ctypes
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.processes import run_ranks
from support.server_process import running_server

import psengine
from psengine.cli.doctor_checks import exchange, machine, servers, variables
from psengine.cli.doctor_checks import report as doctor_report
from psengine.cli.doctor_checks.findings import CheckContext, Level, ok
from psengine.cli.main import main
from psengine.parameter_server.server.transport.authentication import keygen

PACKAGE = Path(psengine.__file__).parent


def run_check(check, variables=None, **context):
    return list(check(CheckContext(variables=variables or {}, **context)))


def exit_code(arguments):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    return end.value.code or 0


# ---- the command -------------------------------------------------------------------------------------------------


def test_the_whole_report_of_a_machine_with_three_mistakes():
    program = (
        "import sys\n"
        "sys.modules['psengine._native'] = None\n"  # as where it was never built
        "from psengine.cli.main import main\n"
        "main(['doctor', '--json', '--model-mb', '100'])\n"
    )
    mistakes = {"OMP_NUM_THREADS": "abc", "PSENGINE_STRATGY": "async", "MASTER_ADDR": "somewhere"}
    environment = {**os.environ, **mistakes}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    findings = report["findings"]
    assert {finding["check"] for finding in findings} == set(doctor_report.CHECKS)
    by_check = {name: [f for f in findings if f["check"] == name] for name in doctor_report.CHECKS}
    assert "itself failed" not in done.stdout
    for finding in findings:
        assert finding["fix"] or finding["level"] in ("ok", "note"), finding
    assert report["counts"]["problem"] == sum(finding["level"] == "problem" for finding in findings) >= 2
    assert by_check["native-extension"][0]["level"] == "warning"
    assert "OMP_NUM_THREADS" in by_check["threads"][0]["text"]
    assert by_check["variables"][0]["fix"] == "did you mean PSENGINE_STRATEGY?"
    assert by_check["launcher"][0]["level"] == "warning"
    # The trial's processes have the extension, and a valid environment.
    transports = {finding["facts"]["transport"]: finding for finding in by_check["exchange"] if finding["facts"]}
    assert transports["gloo"]["facts"]["bytes_per_s"] > 0
    assert "100 MB of gradients" in transports["gloo"]["text"]


def test_selected_checks_are_readable_lines(capsys):
    assert exit_code(["doctor", "--only", "versions", "--only", "cuda"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert re.match(rf"ok +versions +psengine {re.escape(psengine.__version__)}, torch ", lines[0])
    assert "cuda" in lines[1]
    assert lines[-1].startswith("0 problems, ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--only", "hostnam"], "there is no check"),
        (["--server-address", "a:7077"], "malformed"),
        (["--timeout-s", "0"], "timeout"),
        (["--model-mb", "many"], "model-mb"),
    ],
)
def test_wrong_arguments_are_one_message_and_code_2(arguments, words, capsys):
    assert exit_code(["doctor", "--only", "versions", *arguments]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_a_check_that_fails_or_hangs_is_a_finding(monkeypatch):
    def fails(context):
        yield ok("this far")
        raise KeyError("missing")

    def hangs(context):
        yield ok("this far")
        time.sleep(60)

    context = CheckContext(variables={})
    first, second = doctor_report.examine("fails", fails, context)
    assert (first.text, second.level) == ("this far", Level.WARNING)
    assert "KeyError" in second.text
    monkeypatch.setattr(doctor_report, "CHECK_DEADLINE_S", 0.2)
    first, second = doctor_report.examine("hangs", hangs, context)
    assert (first.text, second.level) == ("this far", Level.PROBLEM)
    assert "0.2 s" in second.text


# ---- the machine ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["abc", "0", "2,x"])
def test_a_number_of_threads_that_is_none(text):
    (finding, *_) = run_check(machine.threads, {"OMP_NUM_THREADS": text})
    assert finding.level is Level.PROBLEM
    assert repr(text) in finding.text
    assert re.search(r"OMP_NUM_THREADS=\d+", finding.fix)


def test_more_threads_than_cores():
    cores = len(os.sched_getaffinity(0))
    (finding,) = run_check(machine.threads, {"OMP_NUM_THREADS": str(cores), "LOCAL_WORLD_SIZE": "2"})
    assert finding.level is Level.WARNING
    assert f"2 ranks here with {cores} threads each" in finding.text
    assert run_check(machine.threads, {"OMP_NUM_THREADS": "1"})[0].level is Level.OK


# ---- names ---------------------------------------------------------------------------------------------------------


def _rename_this_host(name):
    """In a namespace of our own; False where that is not allowed."""
    library = ctypes.CDLL(None, use_errno=True)
    new_user, new_names = 0x10000000, 0x04000000
    if library.unshare(new_user | new_names) != 0:
        return False
    socket.sethostname(name)
    return True


def _hostnames(rank, world_size):
    if not _rename_this_host("nowhere.invalid"):
        return None
    alone = run_check(machine.hostname)
    spanning = run_check(machine.hostname, {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"})
    socket.sethostname("localhost")
    return alone, spanning, run_check(machine.hostname)


def test_a_hostname_that_does_not_resolve():
    (found,) = run_ranks(_hostnames, 1, init_group=False)
    if found is None:
        pytest.skip("user namespaces are not allowed here")
    (alone,), (spanning,), (loopback,) = found
    assert "nowhere.invalid, does not resolve" in alone.text
    assert "GLOO_SOCKET_IFNAME" in alone.fix
    assert (alone.level, spanning.level) == (Level.WARNING, Level.PROBLEM)
    assert loopback.level is Level.NOTE  # right for one host
    assert "connect to themselves" in loopback.text


@pytest.mark.parametrize(
    ("given", "level", "words"),
    [
        ({"GLOO_SOCKET_IFNAME": "lo"}, Level.OK, "lo"),
        ({"GLOO_SOCKET_IFNAME": "nope0"}, Level.PROBLEM, "GLOO_SOCKET_IFNAME=nope0: there is no such interface"),
        ({"GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, Level.PROBLEM, "loopback"),
    ],
)
def test_the_interface_that_gloo_is_told_to_take(given, level, words):
    finding = run_check(machine.hostname, given)[0]
    assert finding.level is level
    assert words in finding.text


# ---- variables -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "level", "words"),
    [
        ({}, Level.OK, "no launcher"),
        ({"RANK": "0"}, Level.PROBLEM, "missing WORLD_SIZE"),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "1"}, Level.WARNING, "MASTER_ADDR and MASTER_PORT set"),
        (
            {
                "RANK": "1",
                "WORLD_SIZE": "2",
                "LOCAL_RANK": "1",
                "MASTER_ADDR": "nowhere.invalid",
                "MASTER_PORT": "29500",
            },
            Level.PROBLEM,
            "nowhere.invalid does not resolve",
        ),
        ({"PSENGINE_WORKER": "1", "PSENGINE_WORKERS": "2"}, Level.OK, "independent worker 1 of 2"),
        ({"PSENGINE_WORKER": "1"}, Level.WARNING, "of an unknown number"),
        ({"PSENGINE_WORKER": "2", "PSENGINE_WORKERS": "2"}, Level.PROBLEM, "below PSENGINE_WORKERS=2"),
        ({"PSENGINE_WORKER": "0", "RANK": "1", "WORLD_SIZE": "2"}, Level.WARNING, "joins no process group"),
    ],
)
def test_what_launchers_set(given, level, words):
    (finding,) = run_check(variables.launcher, given)
    assert finding.level is level
    assert words in finding.text
    assert finding.fix or level is Level.OK


@pytest.mark.parametrize(
    ("given", "words", "fix"),
    [
        ({"PSENGINE_STRATGY": "sync"}, "no variable of psengine", "did you mean PSENGINE_STRATEGY?"),
        ({"PSENGIN_SERVERS": "tcp://a:1"}, "no variable of psengine", "did you mean PSENGINE_SERVERS?"),
        ({"PSENGINE_WHATEVER_IT_IS": "1"}, "no variable", "unset it"),
        ({"PSENGINE_STRATEGY": "async:max_stalness=3"}, "max_stalness", "correct PSENGINE_STRATEGY"),
        ({"PSENGINE_SERVERS": "a:7077"}, "malformed", "correct PSENGINE_SERVERS"),
        ({"PSENGINE_COLLECTIVE": "gloo"}, "unknown collective", "correct PSENGINE_COLLECTIVE"),
    ],
)
def test_variables_that_are_misspelt_or_malformed(given, words, fix):
    (finding,) = run_check(variables.variables, {"HOME": "/", **given})
    assert finding.level is Level.PROBLEM
    assert words in finding.text
    assert fix in finding.fix


def test_known_variables_are_those_that_the_source_names():
    named = set()
    for path in PACKAGE.rglob("*.py"):
        if "doctor_checks" not in path.parts:
            named.update(re.findall(r"\bPSENGINE_[A-Z_]*[A-Z]\b", path.read_text()))
    assert named <= {*variables.known_names()}
    values = {"PSENGINE_STRATEGY": "async:max_staleness=4", "PSENGINE_LEASE_S": "5", "PSENGINE_JOB": "mine"}
    assert [finding.level for finding in run_check(variables.variables, values)] == [Level.OK]


# ---- servers -------------------------------------------------------------------------------------------------------


def test_a_server_is_reached_and_measured():
    with running_server(shards=2) as server:
        address = server.addresses[0].replace("127.0.0.1", "localhost")
        findings = run_check(servers.servers, servers=[address], model_bytes=10_000_000)
        text = "\n".join(finding.text for finding in findings)
        assert {finding.level for finding in findings} <= {Level.OK, Level.WARNING}, text  # the machine may be busy
        facts = {name: value for finding in findings for name, value in finding.facts.items()}
        assert (facts["local_address"], facts["shards"]) == ("127.0.0.1", 2)
        assert facts["software"] == psengine.__version__
        assert servers._introduce(address, [{"software": "0.0.1"}], has_keys=False).level is Level.WARNING
        assert facts["round_trip_s"] > 0
        assert facts["bytes_per_s"] == pytest.approx(2 * servers.LARGE_BYTES / facts["echo_s"])
        assert facts["step_s"] == pytest.approx(10_000_000 / servers.LARGE_BYTES * facts["echo_s"])
        assert server.status()["shards"][0]["jobs"] == {}  # it looked, and changed nothing


def test_servers_that_are_not_there():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # not listening
        dead = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        found = run_check(servers.servers, servers=[dead, "tcp://nowhere.invalid:7077", "ipc:///nowhere"])
    assert [finding.level for finding in found] == [Level.PROBLEM] * 3
    assert all(finding.fix for finding in found)
    assert f"{dead}: nobody listens (127.0.0.1 from 127.0.0.1)" in found[0].text
    assert "does not resolve" in found[1].text
    assert "no such socket" in found[2].text


def test_something_else_listens_there():
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        address = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
        connects, silent = run_check(servers.servers, servers=[address], timeout_s=0.5)
    assert connects.level is Level.OK
    assert silent.level is Level.PROBLEM
    assert "did not answer HELLO" in silent.text


def test_a_server_that_wants_other_keys(tmp_path, monkeypatch):
    server_key, server_public = keygen(tmp_path / "server", "server")
    client_key, _ = keygen(tmp_path / "clients", "worker")
    stranger_key, _ = keygen(tmp_path / "elsewhere", "stranger")
    monkeypatch.setenv("PSENGINE_SERVER_KEY", str(server_public))
    with running_server(curve_key=server_key, allow=tmp_path / "clients") as server:
        monkeypatch.setenv("PSENGINE_CLIENT_KEY", str(stranger_key))
        refused = run_check(servers.servers, servers=server.addresses)[-1]
        monkeypatch.setenv("PSENGINE_CLIENT_KEY", str(client_key))
        welcome = run_check(servers.servers, servers=server.addresses)[1]
    assert refused.level is Level.PROBLEM
    assert "does not know this client's public key" in refused.text
    assert "psengine-server keygen" in refused.fix
    assert welcome.level is Level.OK
    assert "encrypted" in welcome.text


def test_gloo_on_an_interface_that_is_not_there(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    (finding,) = run_check(exchange.exchange)
    assert finding.level is Level.PROBLEM
    assert "nope0" in finding.text
