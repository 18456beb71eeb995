"""psengine run: which rank failed first, where one of them wrote of errors that it lived through."""

from __future__ import annotations

import os

import pytest
from support.command_process import run_command

from psengine.cli.launching.failure import failure_time, last_traceback

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
        ([(1.0, ERROR), (3.0, ["  indented"]), (9.0, ["step 7"])], None),
        ([(1.0, ERROR), (3.0, ["step 7"]), (4.0, ERROR)], 4.0),
        # A slow machine: the message came late, but with nothing behind it.
        ([(1.0, ERROR[:2]), (3.0, ERROR[2:])], 1.0),
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
