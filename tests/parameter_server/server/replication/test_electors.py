"""Electors, each against what it is made of: a real etcd; files and processes that are killed and stopped."""

import multiprocessing
import os
import signal
import subprocess
import time

import pytest
from support.etcd_server import etcd_cluster, etcd_server, needs_etcd
from support.waiting import eventually

from psengine.errors import ConfigurationError
from psengine.parameter_server.server.replication.election import ElectorError, Leadership, Member
from psengine.parameter_server.server.replication.etcd import TIMEOUT_S
from psengine.parameter_server.server.replication.replication import make_elector
from psengine.parameter_server.server.settings import make_settings

A, B = Member(2**60 + 1, ("tcp://a:1", "tcp://a:2")), Member(2, ("tcp://b:1",), 7)
FIRST, BOTH, SECOND = Leadership(1, (A,)), Leadership(1, (A, B), 2), Leadership(2, (B,), 3)


def elector(election, **options):
    return make_elector(make_settings({"durability": "replica", "election": election, **options}))


def elector_at(places, name="name", **options):
    return elector(f"etcd={','.join(one.place for one in places)}/{name}", lease_s=1.0, **options)


@pytest.fixture(scope="module")
def etcd():
    with etcd_server() as server:
        yield server


@pytest.fixture(params=["launcher", pytest.param("etcd", marks=needs_etcd)])
def electors(request, tmp_path):
    """Makes the elector of one more server."""
    made = []

    def make():
        place = tmp_path / "record" if request.param == "launcher" else None
        place = place or f"{request.getfixturevalue('etcd').place}/{tmp_path.name}"
        made.append(elector(f"{request.param}={place}"))
        return made[-1]

    try:
        yield make
    finally:
        for one in made:
            one.close()


def test_a_record_changes_by_compare_and_swap_and_the_lease_keeps_others_out(electors):
    first, second = electors(), electors()
    assert first.read() == (None, False)
    assert not first.renew()
    assert first.replace(None, FIRST, takes_over=True)
    assert not second.replace(None, SECOND, takes_over=True)
    assert second.read() == (FIRST, True)
    assert first.renew()
    assert first.replace(FIRST, BOTH, takes_over=False)
    assert not first.replace(FIRST, SECOND, takes_over=False)
    assert not second.replace(BOTH, SECOND, takes_over=True)  # the lease stands
    second.ask_to_end(BOTH)
    first.close()  # in order: at once
    assert second.read() == (BOTH, False)
    assert second.replace(BOTH, SECOND, takes_over=True)
    assert electors().read() == (SECOND, True)


@needs_etcd
def test_etcd_s_lease_ends_after_silence_and_no_answer_says_nothing(etcd, tmp_path):
    first, second, other = (elector_at([etcd], name) for name in ("one", "one", "other"))
    try:
        assert first.replace(None, BOTH, takes_over=True)
        assert other.read() == (None, False)  # another server's
        etcd.signal(signal.SIGSTOP)
        started_s = time.monotonic()
        with pytest.raises(ElectorError, match=rf"etcd at {etcd.place} does not answer .* Fix: start etcd"):
            first.replace(BOTH, FIRST, takes_over=False)
        assert time.monotonic() - started_s < 4 * TIMEOUT_S
        etcd.signal(signal.SIGCONT)
        eventually(lambda: not second.read()[1], "the lease ends")
        assert not first.renew()
        recorded = second.read()[0]
        assert recorded in (FIRST, BOTH)  # what has no answer may be done
        etcd.end()
        with pytest.raises(ElectorError):
            second.read()
        etcd.start()
        assert second.read() == (recorded, False)
        assert second.replace(recorded, SECOND, takes_over=True)
    finally:
        for one in (first, second, other):
            one.close()


@needs_etcd
def test_servers_of_one_etcd_are_asked_in_turn_and_another_etcd_s_record_is_not_believed():
    with etcd_cluster(3) as servers, etcd_server() as other:
        first, second = elector_at(servers), elector_at([*servers[1:], other])
        try:
            assert first.replace(None, BOTH, takes_over=True)
            servers[0].end()
            with pytest.raises(ElectorError, match=servers[0].place):
                first.replace(BOTH, FIRST, takes_over=False)
            assert eventually(lambda: answered(first), "the next one is asked")[0] == BOTH
            assert second.read()[0] == BOTH
            assert not second.replace(None, SECOND, takes_over=True)
            servers[1].end()  # there is no majority: nobody decides anything
            with pytest.raises(ElectorError):
                second.replace(BOTH, SECOND, takes_over=True)
            with pytest.raises(ElectorError, match=servers[2].place):
                second.read()
            with pytest.raises(ElectorError, match=f"{other.place} .* got another etcd"):
                second.replace(None, SECOND, takes_over=True)
            servers[0].start()
            assert eventually(lambda: answered(first), "a majority answers")[0] == BOTH
        finally:
            for one in (first, second):
                one.close()


def answered(elector):
    """What it reads; None where it gets no answer."""
    try:
        return elector.read()
    except ElectorError:
        return None


@needs_etcd
def test_etcd_over_tls_with_a_user_and_password(tmp_path):
    certificate, login = tmp_path / "ca.pem", tmp_path / "login"
    line = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=etcd -addext subjectAltName=IP:127.0.0.1"
    files = ["-keyout", str(tmp_path / "key.pem"), "-out", str(certificate)]
    subprocess.run([*line.split(), *files], check=True, capture_output=True)
    login.touch(mode=0o600)
    login.write_text("root:a word: and another\n")
    with etcd_server(certificate) as etcd:
        etcd.post("auth/user/add", name="root", password="a word: and another")
        etcd.post("auth/role/add", name="root")
        etcd.post("auth/user/grant", user="root", role="root")
        etcd.post("auth/enable")
        good = elector_at([etcd], etcd_ca=certificate, etcd_login=login)
        try:
            assert good.replace(None, BOTH, takes_over=True)
            assert good.renew()
            assert good.read() == (BOTH, True)
            etcd.end()
            etcd.start()  # it has forgotten who logged in
            assert eventually(lambda: answered(good), "a new login")[0] == BOTH
            for settings, words in (
                ({"etcd_ca": certificate}, "user name is empty"),
                ({"etcd_ca": "/etc/ssl/certs/ca-certificates.crt"}, "CERTIFICATE_VERIFY_FAILED"),
                ({}, "does not answer"),
            ):
                bad = elector_at([etcd], **settings)
                with pytest.raises(ElectorError, match=words):
                    bad.replace(BOTH, SECOND, takes_over=True)
                bad.close()
            login.write_text("root:wrong")
            with pytest.raises(ElectorError, match="authentication failed"):
                elector_at([etcd], etcd_ca=certificate, etcd_login=login).read()
            assert good.read()[0] == BOTH
        finally:
            good.close()
    login.write_text("root")
    with pytest.raises(ConfigurationError, match="login holds no login"):
        elector_at([etcd], etcd_ca=certificate, etcd_login=login)


def hold(path, said):
    holder = elector(f"launcher={path}")
    holder.replace(None, BOTH, takes_over=True)
    said.set()
    time.sleep(60.0)


def test_a_process_keeps_a_launcher_s_lease_while_it_is_stopped_until_it_is_dead(tmp_path):
    context = multiprocessing.get_context("fork")
    said = context.Event()
    process = context.Process(target=hold, args=(tmp_path / "record", said))
    process.start()
    second = elector(f"launcher={tmp_path / 'record'}")
    try:
        assert said.wait(20.0)
        os.kill(process.pid, signal.SIGSTOP)
        assert not second.replace(BOTH, SECOND, takes_over=True)
        assert second.to_end() is None
        second.ask_to_end(BOTH)
        assert second.to_end() == BOTH  # what the launcher reads before it kills
        process.kill()
        process.join(10.0)
        assert second.replace(BOTH, SECOND, takes_over=True)
        assert second.to_end() is None
    finally:
        process.kill()
        process.join(10.0)
        second.close()


def test_a_record_that_cannot_be_read_is_an_error_with_its_place(tmp_path):
    place = tmp_path / "absent" / "record"
    reader = elector(f"launcher={place}")
    with pytest.raises(ElectorError, match=f"{place} cannot be read"):
        reader.read()
    place.parent.mkdir()
    place.write_text("{}")
    with pytest.raises(ElectorError, match=f"{place} does not say who leads"):
        reader.read()
