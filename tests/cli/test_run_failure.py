"""psengine run: which rank failed first, and what it said."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess

import pytest
from support.command_process import WORKER, run_command, running_command
from support.marks import slow
from support.waiting import eventually

from psengine.cli.launching.failure import RankEnd, failure_time, first_failure, last_traceback
from psengine.cli.launching.processes import DeathWatch


@pytest.mark.parametrize(
    ("end", "code", "fate", "traceback"),
    [
        ("raise", 1, "exit code 1", ["KeyError: 'weights'", "direct cause", "ValueError: bad checkpoint"]),
        ("kill", 137, r"killed by SIGKILL \(by someone or by the kernel, but not for lack of memory\)", []),
        slow("segfault", 139, "killed by SIGSEGV", ["Segmentation fault", "launched_worker.py"]),
    ],
)
def test_the_rank_that_failed_first_is_named(end, code, fate, traceback):
    exit_code, _, err = run_command(["run", "--workers", "2", WORKER, end])
    assert exit_code == code
    report = err[err.index("psengine run: ") :]
    host = re.escape(socket.gethostname())
    assert re.match(rf"psengine run: rank 1 \(local rank 1\) on host {host} failed first, at [\d:]+: {fate}", report), (
        err
    )
    for words in traceback:
        assert words in report
        assert words in err[: err.index("psengine run: ")]  # and was shown when it happened
    assert "ended because of it: rank 0" in report


def test_a_log_file_has_the_traceback(tmp_path):
    options = ["--workers", "2", "--log-dir", str(tmp_path), "--redirects", "3"]
    code, out, err = run_command(["run", *options, WORKER, "raise"])
    assert (code, out) == (1, "")
    assert "ValueError: bad checkpoint" in err
    assert len(list(tmp_path.glob("**/stderr.log"))) == 2


# Rank 0 handles an error and says so; rank 1 ends without a word; rank 0 notices, and ends as well.
LIVED_THROUGH = """
import os, signal, sys, time, traceback

directory, exit_code = sys.argv[1], int(sys.argv[2])
pipe = f"{directory}/alive"
if os.environ["RANK"] == "1":
    with open(pipe, "wb"):
        time.sleep(0.5)
        os._exit(4)
signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it ends by itself, not with its launcher's help
try:
    1 / 0
except ZeroDivisionError:
    traceback.print_exc()
with open(pipe, "rb") as alive:
    alive.read()
time.sleep(0.3)
os._exit(exit_code)
"""


def test_an_error_that_a_rank_lived_through_does_not_make_it_the_first(tmp_path):
    script = tmp_path / "lived_through.py"
    script.write_text(LIVED_THROUGH)
    os.mkfifo(tmp_path / "alive")
    code, _, err = run_command(["run", "--workers", "2", str(script), str(tmp_path), "9"])
    assert code == 4, err
    assert "psengine run: rank 1 (local rank 1)" in err
    assert "failed after it: rank 0, exit code 9: ZeroDivisionError" in err


ERROR = ["Traceback (most recent call last):", '  File "a.py", line 1', "ValueError: x", "second line of the message"]


@pytest.mark.parametrize(
    ("written", "spoke_s"),
    [
        ([(1.0, ERROR)], 1.0),
        ([(0.5, ["noise"]), (1.0, ERROR), (1.1, ["", "[W] destroy_process_group() was not called"])], 1.0),
        ([(1.0, ERROR), (3.0, ["", " "])], 1.0),
        ([(1.0, ERROR), (3.0, ["step 7"])], None),
        ([(1.0, ERROR), (3.0, ["step 7"]), (4.0, ERROR)], 4.0),
        ([(1.0, ["  + Exception Group Traceback (most recent call last):", "  | ExceptionGroup: two"])], 1.0),
    ],
)
def test_a_traceback_counts_where_it_is_the_last_word(written, spoke_s):
    lines = [(when, line) for when, block in written for line in block]
    assert last_traceback(lines)[0] == spoke_s


@pytest.mark.parametrize(
    ("exit_code", "spoke_s", "failed_s"),
    [(1, 7.0, 7.0), (1, None, 9.0), (9, 7.0, 9.0), (-9, 7.0, 9.0), (1, -30.0, 9.0)],
)
def test_a_rank_failed_when_it_spoke_only_where_it_ended_of_that(exit_code, spoke_s, failed_s):
    assert failure_time(exit_code, spoke_s, 9.0) == failed_s


def test_the_last_traceback_comes_with_its_causes():
    text = """noise
Traceback (most recent call last):
  File "old.py", line 1
OldError: lived through

more noise
Traceback (most recent call last):
  File "a.py", line 1
KeyError: 'a'

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "b.py", line 2
ValueError: b"""
    lines = [(number / 100, line) for number, line in enumerate(text.splitlines())]
    when, found = last_traceback(lines)
    assert when == 0.12
    assert list(found) == text.splitlines()[6:]
    assert last_traceback(lines[:1]) == (None, ("noise",))
    group = ["  + Exception Group Traceback (most recent call last):", "  | ExceptionGroup: two (1 sub-exception)"]
    group += [
        "  +-+---------------- 1 ----------------",
        "    | Traceback (most recent call last):",
        "    | ValueError: c",
    ]
    assert last_traceback([(1.0, line) for line in ["x", *group]])[1] == tuple(group)
    long = [ERROR[0], *(f"  line {number}" for number in range(100)), "ValueError: x"]
    assert last_traceback([(1.0, line) for line in long])[1][30] == "... 42 lines left out ..."


def end(rank, code, failed_s, *words, was_ended=False):
    return RankEnd(
        rank=rank, local_rank=rank, host="h", pid=rank, exit_code=code, failed_s=failed_s, traceback=words,
        was_ended=was_ended,
    )  # fmt: skip


def test_the_first_failure_is_no_consequence():
    lost = "psengine.errors.PeerLostError: Lost rank 2 (process 7 on h)"
    assert first_failure([end(0, 0, None), end(1, 0, None)]) is None
    # The peers of rank 2 were quicker to say that it is gone than it was to end.
    ends = [end(0, 1, 3.0, lost), end(1, 1, 3.1, lost), end(2, 1, 3.2, "ValueError: x"), end(3, 0, None)]
    assert first_failure(ends).rank == 2
    assert first_failure([end(0, -9, 5.0), end(1, -15, 4.0, was_ended=True), end(2, 1, 6.0, "x")]).rank == 0
    assert first_failure([end(0, 1, 2.0, lost), end(1, 1, 1.0, lost)]).rank == 1


def test_deaths_are_noted_in_their_order():
    watch = DeathWatch()
    processes = [subprocess.Popen(["sh", "-c", "read x; exit 3"], stdin=subprocess.PIPE) for _ in range(2)]
    for process in processes:
        watch.add(process.pid)
    processes[1].stdin.close()
    eventually(lambda: processes[1].pid in watch.ended_s)
    processes[0].send_signal(signal.SIGKILL)
    watch.settle(processes[0].pid)
    assert watch.ended_s[processes[1].pid] < watch.ended_s[processes[0].pid]
    assert [watch.exit_codes[process.pid] for process in processes] == [-signal.SIGKILL, 3]
    assert [process.wait() for process in processes] == [-signal.SIGKILL, 3]
    processes[0].stdin.close()


def nobody_reads_stderr():
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 2)


def test_a_failure_that_cannot_be_said_has_its_exit_code():
    with running_command(["run", "--workers", "2", WORKER, "exit"], prepare=nobody_reads_stderr) as command:
        assert command.wait() == 7
        assert " has " in command.stdout  # of one worker at least: its end may come before the other has begun
