"""Ranks of one machine that share memory only with some of the others, as ranks of several hosts do."""

import ctypes
import os

import pytest

_PR_SET_DUMPABLE = 4
_FIRST_USER = 60_000
needs_users = pytest.mark.skipif(
    not hasattr(os, "setresuid") or os.geteuid() != 0, reason="needs root, to run ranks as several users"
)


def live_on_host(number: int) -> None:
    """From now on this process shares memory only with processes that have called this with the same number.

    It becomes another user, and the kernel lets no user open another one's memory.
    """
    user = _FIRST_USER + number
    os.setresuid(user, user, user)
    # A process that changes its user hides its /proc from everybody until it says otherwise (man 2 prctl).
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
