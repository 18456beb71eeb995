"""Views and releases: signed by the coordinator, and the same value after any way through bodies."""

import subprocess
import sys
from dataclasses import replace

import pytest

from psengine.errors import ProtocolError
from psengine.protocol.frames import decode, encode
from psengine.protocol.views import (
    MemberState,
    Release,
    View,
    ViewMember,
    check_digest,
    message_of,
    release_of,
    sign,
    view_of,
)

KEY, OTHER = bytes(range(32)), bytes(32)
STATES = MemberState(8, 4, "host", 5, "processes"), MemberState(None, 0)
RELEASES = (Release(6, 8, ((0, 8), (2, 7))), Release(7, 4))
VIEW = View(
    3, 2**64 - 1, (ViewMember(0, 2**64 - 1, "", 1), ViewMember(2, 5, "key", 9)), (7, 8), 9, 2, 0, (1, 3), RELEASES
)  # fmt: skip


@pytest.mark.parametrize(("value", "read"), [(VIEW, view_of), *((one, release_of) for one in RELEASES)])
def test_what_is_signed_comes_out_and_is_accepted(value, read):
    message = decode(encode(message_of(value, KEY, 77)))
    assert read(message.body) == value
    check_digest(message, KEY, read(message.body))


@pytest.mark.parametrize(("key", "job"), [(OTHER, 77), (KEY, 78)])
def test_another_key_or_job_is_refused(key, job):
    message = decode(encode(message_of(VIEW, KEY, 77)))
    with pytest.raises(ProtocolError, match="VIEW 3 is not of this job's coordinator"):
        check_digest(replace(message, job=job), key, VIEW)


def test_each_field_is_signed():
    other = {
        "number": 4, "epoch": 1, "members": VIEW.members[:1], "shards": (7, 9), "from_step": 8, "world_size": 3,
        "donor": None, "chunks": (2, 3), "releases": RELEASES[:1],
        "servers": ("a", "b"), "states": STATES,
    }  # fmt: skip
    values = {name: getattr(VIEW, name) for name in View.__struct_fields__}
    assert other.keys() == values.keys()
    digests = {sign(KEY, 77, View(**values | {name: value})) for name, value in other.items()}
    assert len(digests | {sign(KEY, 77, VIEW)}) == len(other) + 1


def test_threads_may_meet_a_type_first_together():
    """msgspec crashes where two threads learn one type at once, so importing teaches it."""
    program = (
        "import threading, sys; sys.setswitchinterval(1e-6)\n"
        "from psengine.protocol import bodies\n"
        "from psengine.protocol.messages import MessageType\n"
        "def work():\n"
        "    for kind in MessageType:\n"
        "        try: bodies.convert({'view': [1, 2, [[0, 1, '', 1]], [3]]}, bodies.TYPES[kind], '')\n"
        "        except Exception: pass\n"
        "threads = [threading.Thread(target=work) for _ in range(8)]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
