"""Ray's TorchTrainer with psengine's strategies, on a cluster of two nodes on this machine."""

import importlib
import importlib.util
import json
import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.waiting import eventually

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "support" / "ray_trainings.py"
MARKER = "PSENGINE_TEST_RAY"
DEADLINE_S = 900


def on_a_cluster(test):
    # The first test's time includes the trainings.
    return pytest.mark.slow(pytest.mark.timeout(DEADLINE_S + 100)(test))


def require_ray():
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed: pip install 'ray[train]'")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What each training of ray_trainings.py left; the cluster is up once."""
    require_ray()
    out = tmp_path_factory.mktemp("ray") / "out.json"
    log = out.with_suffix(".log")
    token = secrets.token_hex(8)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), MARKER: token}
    with log.open("w") as stream:
        program = subprocess.Popen(
            [sys.executable, PROGRAM, out], stdout=stream, stderr=subprocess.STDOUT, env=environment,
            start_new_session=True,
        )  # fmt: skip
        try:
            code = program.wait(DEADLINE_S)
            eventually(lambda: not processes_with(token), "the end of all processes")
        finally:
            for pid in processes_with(token):
                os.kill(pid, signal.SIGKILL)
            program.wait(10)
    assert code == 0, log.read_text()[-8000:]
    return json.loads(out.read_text())


def processes_with(token):
    """The processes that inherited the marker: everything that the program started."""
    wanted = f"{MARKER}={token}".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if wanted in path.read_bytes().split(b"\0") and b"\0" in (path.parent / "cmdline").read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@on_a_cluster
@pytest.mark.parametrize("strategy", ["sync", "sync-server"])
def test_two_ranks_get_equal_bits_from_a_group_and_from_servers(trained, strategy):
    ours = trained[strategy]
    assert ours["error"] == ""
    assert ours["start-0-0"]["strategy"] == strategy
    assert ours["end-0"] == ours["end-1"] == trained["sync"]["end-0"]
    assert ours["metrics"]["epoch"] == 2
    places = [ours[f"start-{worker}-0"]["context"] for worker in range(2)]
    assert places == [[0, 2, 0, 2, True], [1, 2, 1, 2, False]]


@on_a_cluster
def test_a_failed_rank_of_a_group_starts_all_again_from_the_checkpoint(trained):
    found = trained["sync-failed"]
    assert found["error"] == ""
    assert [found[f"start-{worker}-1"]["epoch"] for worker in range(2)] == [1, 1]
    assert found["end-0"] == found["end-1"] == trained["sync"]["end-0"]


@on_a_cluster
def test_a_killed_worker_is_started_again_alone_and_goes_on(trained):
    found = trained["async-killed"]
    assert found["error"] == ""
    first, second = found["start-1-0"], found["start-1-1"]
    assert "start-0-1" not in found, "the other worker was started again"
    assert first["pid"] != second["pid"]
    assert [first["context"], second["context"]] == [[0, 1, 1, 2, False]] * 2
    assert found["start-0-0"]["context"] == [0, 1, 0, 2, True]
    assert second["epoch"] > 0
    # It begins with the servers' weights, which have gone on since the checkpoint that it loaded.
    assert second["begun_with"] != second["before"]
    assert found["metrics"]["epoch"] == 5
    assert {"end-0", "end-1"} <= found.keys()


@on_a_cluster
def test_a_killed_server_goes_on_from_its_snapshot(trained):
    found = trained["async-server-killed"]
    assert found["error"] == ""
    assert "start-0-1" not in found, "a worker was started again"
    assert "start-1-1" not in found, "a worker was started again"
    (before,), (after,) = found["servers before"], found["servers after"]
    assert before["epoch"] != after["epoch"], "the server was not started again"
    # The job's updates go on from those of the snapshot.
    counts = [status["jobs"]["default"]["version_max"] for status in (before, after)]
    assert counts[0] >= 3 * 4
    assert counts[1] > counts[0]


@on_a_cluster
def test_a_report_that_would_wait_for_ever_is_an_error(trained):
    error = trained["reports-wrongly"]["error"]
    assert "independent workers do not" in error
    assert "psengine.integrations.ray.report" in error


@on_a_cluster
def test_nothing_is_left_after_success_and_failure(trained):
    assert "died unexpectedly" in trained["gives-up"]["error"]
    assert not [found["left"] for found in trained.values() if found["left"]]


@on_a_cluster
def test_the_program_of_the_page_learns(trained):
    assert trained["page"]["metrics"]["epoch"] == 19
    assert trained["page"]["metrics"]["loss"] < 0.5


WRONG = [
    ({"strategy": "asink"}, "unknown strategy"),
    ({"strategy": "sync", "servers": 1}, "expected 0, got servers=1"),
    ({"strategy": "async", "servers": 0}, "expected 1, got servers=0"),
    ({"strategy": "async:servers=tcp://a:1", "servers": 1}, "tcp://a:1 named"),
    ({"strategy": "sync", "server_options": {"shards": 2}}, "servers that this run starts"),
    ({"strategy": "sync-server", "snapshot_dir": "/tmp/a"}, "the workers hold the weights"),
    ({"strategy": "async", "server_options": {"bind": "tcp://0.0.0.0:1"}}, "set these settings themselves"),
    ({"strategy": "async", "server_options": {"shards": 0}}, "(expected greater than or equal to 1, got 0)"),
]


@pytest.mark.slow  # importing Ray Train takes seconds
def test_a_wrong_configuration_is_refused_where_it_is_made():
    require_ray()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    program = (
        "import json, sys\nfrom psengine.integrations.ray import PSEngineConfig\n"
        "from psengine.errors import ConfigurationError\nfound = []\n"
        "for options in json.loads(sys.argv[1]):\n"
        "    try:\n        PSEngineConfig(**options)\n        found.append('accepted')\n"
        "    except ConfigurationError as error:\n        found.append(str(error))\n"
        "config = PSEngineConfig('async', server_options={'max_memory_bytes': '8GiB'})\n"
        "assert config.secret not in repr(config) + repr(config.to_dict())\n"
        "print(json.dumps(found))"
    )
    command = [sys.executable, "-c", program, json.dumps([options for options, _ in WRONG])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    for (options, expected), message in zip(WRONG, found, strict=True):
        assert expected in message, options
