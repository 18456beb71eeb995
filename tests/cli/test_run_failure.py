"""psengine run: what it says of a rank that fails, and what it starts again."""

import os
import re
import socket
import subprocess
import sys

import pytest
from support.command_process import WORKER, run_command, running_command
from support.marks import slow
from support.processes import free_port

TRAINING = """
import os, signal, sys, torch, psengine
context = psengine.init()
model = psengine.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = psengine.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01), model)
for step in range(20):
    optimizer.zero_grad()
    model(torch.ones(8, 4)).sum().backward()
    optimizer.step()
    if step == 5 and context.rank == 1 and not os.path.exists(sys.argv[2]):
        open(sys.argv[2], "w").close()
        {}
print("trained to the end")
psengine.shutdown()
"""


@pytest.mark.parametrize(
    ("end", "code", "fate", "words"),
    [
        ("raise", 1, "exit code 1", ["ValueError: bad checkpoint"]),
        ("kill", 137, r"killed by SIGKILL \(by someone, or by the kernel", []),
        slow("segfault", 139, "killed by SIGSEGV", ["Segmentation fault", "launched_worker.py"]),
    ],
)
def test_the_rank_that_failed_first_is_named(end, code, fate, words):
    exit_code, _, err = run_command(["run", "--workers", "2", WORKER, end])
    assert exit_code == code
    report = err[err.index("psengine run: ") :]
    host = re.escape(socket.gethostname())
    assert re.match(rf"psengine run: rank 1 on {host} failed first, at [\d:]+: {fate}", report), err
    for word in words:
        assert word in report
        assert word in err[: err.index("psengine run: ")]  # and was shown when it happened
    assert "psengine run: rank 0 ended because of it" in report


def test_a_log_file_has_the_traceback(tmp_path):
    options = ["--workers", "2", "--log-dir", str(tmp_path), "--redirects", "3"]
    code, out, err = run_command(["run", *options, WORKER, "raise"])
    assert (code, out) == (1, "")
    assert "ValueError: bad checkpoint" in err
    assert len(list(tmp_path.glob("**/stderr.log"))) == 2


UNUSED = """
import torch, psengine
psengine.init()
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)
    def forward(self, x):
        return self.used(x)
model = psengine.DistributedDataParallel(Model())
for _ in range(2):
    model(torch.ones(8, 4)).sum().backward()
"""


def test_an_error_of_ours_is_the_users_line_and_one_sentence(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(UNUSED)
    code, _, err = run_command(["run", "--workers", "2", str(script)])
    assert code == 1
    assert f"{script}:12: model(torch.ones(8, 4)).sum().backward()\n  ReductionError: Expected to have finished" in err
    assert "psengine run: ranks 0-1 on " in err
    assert err.count("ReductionError") == 1
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("raised", "wants", "expected", "absent"),
    [
        ("ModuleError('ours')", "", "train.py:4: raise ModuleError('ours')\nModuleError: ours", "Traceback"),
        ("ModuleError('ours')", "1", "Traceback (most recent call last):", "PSENGINE_TRACEBACK"),
        ("ValueError('theirs')", "", "Traceback (most recent call last):", "PSENGINE_TRACEBACK"),
    ],
)
def test_without_a_launcher_the_process_itself_says_it(raised, wants, expected, absent, tmp_path, monkeypatch):
    monkeypatch.setenv("PSENGINE_TRACEBACK", wants)
    script = tmp_path / "train.py"
    script.write_text(f"import psengine\nfrom psengine.errors import ModuleError\npsengine.init()\nraise {raised}\n")
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert ended.returncode == 1
    assert expected in ended.stderr
    assert absent not in ended.stderr


REPEATED = "not started again: the same program would fail so again"
NOT_ELASTIC = """
import torch, psengine
psengine.init()
model = psengine.DistributedDataParallel(torch.nn.Linear(4, 2))
model(torch.ones(8, 4)).sum().backward()
"""


@pytest.mark.parametrize(
    ("options", "source", "said"),
    [
        (["--independent", "--strategy", "sync:virtual_workers=4"], NOT_ELASTIC, "ReductionError: with virtual"),
        (["--strategy", "sync-server", "--max-restarts", "3"], "import no_such_module", "ModuleNotFoundError: No"),
        (["--max-restarts", "3"], "import argparse; argparse.ArgumentParser().parse_args(['-x'])", "unrecognized"),
    ],
)
def test_what_would_repeat_ends_the_run_at_once(options, source, said, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(source)
    code, _, err = run_command(["run", "--workers", "2", *options, str(script)])
    assert code in (1, 2)
    assert said in err
    assert REPEATED in err
    assert not re.search("starting .* again|a worker that dies", err)


def test_a_rank_that_left_in_order_is_named(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAINING.format("sys.exit(0)"))
    code, _, err = run_command(["run", "--workers", "2", str(script), "x", str(tmp_path / "left")])
    assert code == 1
    assert "psengine run: rank 1 left in order (exit code 0), in the middle of a step; the others lost it:\n" in err
    assert "  rank 0: PeerLostError: Lost rank 1" in err


def test_a_killed_rank_is_replaced_with_all_others(tmp_path):
    """Their group is a new one: torchrun's store still has the addresses of the dead."""
    script = tmp_path / "train.py"
    script.write_text(TRAINING.format("os.kill(os.getpid(), signal.SIGKILL)"))
    line = ["run", "--workers", "2", "--max-restarts", "1", "--collective", "c10d"]
    code, out, err = run_command([*line, str(script), "x", str(tmp_path / "killed")])
    assert code == 0, err
    assert "rank 1 on" in err
    assert "psengine run: starting all workers again (1 of 1)" in err
    assert out.count("trained to the end") == 2


@pytest.mark.slow
def test_two_nodes_meet_again_after_a_rank_was_killed(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(TRAINING.format("os.kill(os.getpid(), signal.SIGKILL)"))
    line = ["run", "--nnodes", "2", "--local-addr", "127.0.0.1", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    line += ["--max-restarts", "2", "--collective", "c10d", str(script), "x", str(tmp_path / "killed")]
    with running_command(line) as one, running_command(line) as two:
        assert (one.wait(120), two.wait(120)) == (0, 0), one.stderr + two.stderr
        assert "trained to the end" in one.stdout
        assert "trained to the end" in two.stdout


def test_the_wait_for_further_nodes_is_said():
    line = ["run", "--nnodes", "1:2", "--rdzv-conf", "last_call_timeout=1", "--local-addr", "127.0.0.1"]
    code, _, err = run_command([*line, "--rdzv-endpoint", f"127.0.0.1:{free_port()}", WORKER, "well"])
    assert code == 0, err
    assert "waiting for 2 nodes at 127.0.0.1:" in err


def test_independent_workers_die_alone(tmp_path):
    """Rank 1 fails once, rank 3 for good; nobody connects, because these workers train nothing."""
    options = ["--independent", "--strategy", "async", "--server-address", "tcp://127.0.0.1:9", "--workers", "3"]
    options += ["--max_restarts", "1", "--first-worker", "1", "--shutdown-timeout=3"]
    # As srun and mpirun place a process.
    placed = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_LOCALID": "3", "OMPI_COMM_WORLD_RANK": "0"}
    code, out, err = run_command(["run", *options, WORKER, "fail-once-and-for-good", str(tmp_path)], environment=placed)
    assert code == 1, err
    assert out.count("foreign=[]") == 5
    assert [out.count(f"worker {rank} has") for rank in range(5)] == [0, 2, 1, 2, 0]
    assert "RANK=None PSENGINE_WORKER=2 PSENGINE_WORKERS=4 WORLD_SIZE=None" in out
    assert out.count("[worker 2] worker 2 has") == 1
    assert "when a worker dies, it alone is started again (--max-restarts 1); the others go on" in err
    assert "worker 1 failed: exit code 1\n  not yet\npsengine run: starting worker 1 again (1 of 1)" in err
    assert "worker 3 is not started again" in err


def nobody_reads_stderr():
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 2)


def test_a_failure_that_cannot_be_said_has_its_exit_code():
    with running_command(["run", "--workers", "2", WORKER, "exit"], prepare=nobody_reads_stderr) as command:
        assert command.wait() == 7
        assert " has " in command.stdout  # of one worker at least: its end may come before the other has begun
