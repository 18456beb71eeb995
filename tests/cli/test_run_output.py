"""psengine run: what workers write, and how it is shown."""

from __future__ import annotations

import os
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from support.waiting import eventually

from psengine.cli.launching import output as worker_output
from psengine.cli.launching.output import WorkerOutput


@contextmanager
def shown_output(directory, **options):
    """(output, what it shows)."""
    file = directory / "shown"
    with open(file, "wb", buffering=0) as target:
        output = WorkerOutput(directory, target, target, **options)
        yield output, lambda: file.read_bytes().decode()
        output.close(lambda: False)


def test_pipes_of_workers_that_were_started_again_are_closed(tmp_path):
    with shown_output(tmp_path) as (output, shown):
        before = len(os.listdir("/proc/self/fd")), len(os.listdir(tmp_path))
        for life in range(4):
            for is_stderr in (False, True):
                Path(output.pipe(0, is_stderr=is_stderr)).write_bytes(b"life %d\nunfinished" % life)
            assert [line for _, line in output.last_lines(0)] == [f"life {life}", "unfinished"]
        eventually(lambda: (len(os.listdir("/proc/self/fd")), len(os.listdir(tmp_path))) == before)
        lines = shown().splitlines()
    assert sorted(lines) == sorted(2 * [f"[rank 0] life {life}" for life in range(4)] + 8 * ["[rank 0] unfinished"])


def test_the_end_does_not_wait_for_a_child_that_has_the_pipe_open(tmp_path):
    with (
        shown_output(tmp_path) as (output, shown),
        open(output.pipe(0, is_stderr=True), "wb", buffering=0) as child,
    ):
        child.write(b"last words\n")
        assert [line for _, line in output.last_lines(0)] == ["last words"]
        assert shown() == "[rank 0] last words\n"


def test_a_line_begins_behind_an_unfinished_one_on_the_next(tmp_path):
    with (
        shown_output(tmp_path, plain_ranks=[0]) as (output, shown),
        open(output.pipe(0, is_stderr=False), "wb", buffering=0) as bar,
        open(output.pipe(1, is_stderr=False), "wb", buffering=0) as others,
    ):
        expected = ""
        for file, written, seen in (
            (bar, "\r50%", "\r50%"),
            (others, "half\n", "\n[rank 1] half\n"),
            (bar, "\r100%\n", "\r100%\n"),
            (others, "\r10%\r20%\rdone\n", "[rank 1] done\n"),
        ):
            expected += seen
            file.write(written.encode())
            eventually(lambda expected=expected: shown() == expected)


INTERRUPT = ["Traceback (most recent call last):", '  File "a.py", line 1', "KeyboardInterrupt"]
ERROR = [*INTERRUPT[:2], "ValueError: x"]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ([INTERRUPT], []),
        ([["a"], INTERRUPT, [""], ["b"], INTERRUPT], [["a"], [""], ["b"]]),
        ([ERROR, INTERRUPT], [ERROR]),
        ([INTERRUPT, ERROR], [ERROR]),
        ([INTERRUPT[:2], ["checkpoint saved"]], [INTERRUPT[:2], ["checkpoint saved"]]),
        ([INTERRUPT[:2]], [INTERRUPT[:2]]),
    ],
)
def test_only_the_traceback_of_ctrl_c_itself_is_left_out(written, expected, tmp_path):
    with shown_output(tmp_path, plain_ranks=[0]) as (output, shown):
        output.hides_interrupts = True
        Path(output.pipe(0, is_stderr=True)).write_text("".join(f"{line}\n" for block in written for line in block))
        output.last_lines(0)
        assert shown().splitlines() == [line for block in expected for line in block]


def test_a_reader_that_stands_still_does_not_hold_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(worker_output, "DRAIN_S", 0.2)
    reader, writer = os.pipe()
    # As sys.stdout.buffer is: buffered, before a pipe that nobody reads.
    with open(reader, "rb") as unread, open(writer, "wb") as stdout:
        output = WorkerOutput(tmp_path, stdout, stdout)
        worker = os.open(output.pipe(0, is_stderr=True), os.O_WRONLY | os.O_NONBLOCK)

        def fill():
            with suppress(BlockingIOError):
                while os.write(worker, b"x" * 1023 + b"\n"):
                    pass
            return output._screens[1]._lock.locked() and not os.get_blocking(worker)

        eventually(fill)
        assert output.last_lines(0)
        hurried = threading.Event()
        ender = threading.Thread(target=output.close, args=(hurried.is_set,), daemon=True)
        ender.start()
        ender.join(0.2)
        assert ender.is_alive()  # a pager has all the time it wants
        hurried.set()
        ender.join(20)
        assert not ender.is_alive()
        os.close(worker)
        unread.close()
