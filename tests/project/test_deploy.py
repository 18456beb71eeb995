"""deploy/: files that nobody runs here name only what exists. tests/environment/test_slurm.py runs Slurm's scripts.

Their commands are those of test_documentation.py.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from psengine.parameter_server.server.settings import ENVIRONMENT_PREFIX, ServerSettings, make_settings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNIT = DEPLOY / "systemd" / "psengine-server.service"
DOCKERFILE = DEPLOY / "docker" / "Dockerfile"


def test_ports_of_jobs_that_share_a_node_are_apart():
    def port_of(script, number):
        (line,) = re.findall(r"^port=.*$", (DEPLOY / "slurm" / script).read_text(), re.MULTILINE)
        values = {"PATH": os.environ["PATH"], "SLURM_JOB_ID": str(number), "SHARDS": "4"}
        done = subprocess.run(
            ["bash", "-uec", f"{line}; echo $port"], env=values, capture_output=True, text=True, timeout=10, check=True
        )
        return int(done.stdout)

    numbers = (41_999, 42_000, 42_001)
    servers = [port_of("async.sbatch", number) + shard for number in numbers for shard in range(4)]
    meetings = [port_of("sync.sbatch", number) for number in numbers]
    assert len(set(servers)) == len(servers)
    assert len(set(meetings)) == len(meetings)
    assert max(servers) < 30000 <= min(meetings)
    assert all(1024 < port < 32768 for port in (*servers, *meetings))  # Linux gives those above to clients


def test_the_images_are_made_of_what_there_is():
    text = DOCKERFILE.read_text()
    ignored = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().split()
    sources = [word for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE) for word in line.split()[:-1]]
    assert sources
    for source in sources:
        assert (ROOT / source).exists(), source
        assert f"!{source}" in ignored
    stages = re.findall(r"^FROM \S+ AS (\S+)$", text, re.MULTILINE)
    assert stages == ["build", "worker", "server"]
    assert set(re.findall(r"COPY --from=(\S+)", text)) <= set(stages)


def test_the_unit_is_one_that_systemd_takes(tmp_path):
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed")
    # What is installed here, at the path where an administrator would install it.
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/usr/local/bin/psengine-server", sys.executable))
    done = subprocess.run([program, "verify", "--man=no", copy], capture_output=True, text=True, timeout=30)
    if "Failed to" in done.stderr and UNIT.name not in done.stderr:
        pytest.skip(f"systemd-analyze does not work here: {done.stderr.strip()}")
    assert (done.returncode, done.stderr) == (0, "")


def test_the_settings_are_a_servers():
    given = dict(re.findall(r"^(\w+)=(.*)", (DEPLOY / "systemd" / "server.env").read_text(), re.MULTILINE))
    known = {ENVIRONMENT_PREFIX + name.upper(): name for name in ServerSettings.model_fields}
    own = {known[variable]: text for variable, text in given.items() if variable != "PSENGINE_RUNTIME_DIR"}
    assert make_settings(own).snapshot_dir == Path("/var/lib/psengine")
