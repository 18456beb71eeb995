import math
from pathlib import Path

import pytest

from psengine.cli.server import build_app
from psengine.errors import ConfigurationError
from psengine.parameter_server.server.settings import ServerSettings, make_settings


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for name in ServerSettings.model_fields:
        monkeypatch.delenv(f"PSENGINE_{name.upper()}", raising=False)


def settings_of(*arguments):
    """The settings of a command line."""
    found = []
    build_app(lambda settings, *_: found.append(settings) or 0)(list(map(str, arguments)), standalone_mode=False)
    return found[0]


def test_every_setting_can_be_given_in_each_way(tmp_path, monkeypatch):
    values = {
        "bind": "tcp://0.0.0.0:9000", "shards": 2, "snapshot_dir": str(tmp_path), "snapshot_interval_s": 10.0,
        "durability": "log", "keep_history": True, "follow": None, "election": None, "etcd_ca": None,
        "etcd_login": None, "lease_s": 2.0, "status_port": 9100, "status_bind": "127.0.0.2",
        "curve_key": None, "allow": None, "secret_file": None, "admin_allow": None, "insecure": True,
        "max_memory_bytes": "2GiB", "keep_ended_jobs": "7d", "plugins": "json,os.path", "log_format": "json",
    }  # fmt: skip
    assert list(values) == list(ServerSettings.model_fields)
    given = {name: value for name, value in values.items() if value is not None}
    flags = {f"--{name.replace('_', '-')}": value for name, value in given.items()}
    by_argument = settings_of(*(part for item in flags.items() for part in item if part is not True))
    for name, value in given.items():
        monkeypatch.setenv(f"PSENGINE_{name.upper()}", str(value))
    assert by_argument == settings_of()
    assert by_argument.max_memory_bytes == 2 << 30
    assert by_argument.snapshot_dir == Path(tmp_path)
    assert by_argument.plugins == ("json", "os.path")
    monkeypatch.setenv("PSENGINE_STATUS_PORT", "")
    settings = settings_of("--shards", 4)  # beats the environment
    assert (settings.shards, settings.lease_s, settings.status_port) == (4, 2.0, None)


@pytest.mark.parametrize(
    ("name", "text"),
    [("shards", "two"), ("snapshot_dir", ""), ("max_memory_bytes", "8 elephants"), ("plugins", "not a module")],
)
def test_what_is_no_such_value_is_refused_with_its_option_and_variable(name, text):
    option, variable = f"--{name.replace('_', '-')}", f"PSENGINE_{name.upper()}"
    words = rf"^{name} \({option}, {variable}\) is not understood \(expected .*, got '{text}'\)"
    with pytest.raises(ConfigurationError, match=words):
        settings_of(f"{option}={text}")


@pytest.mark.parametrize(
    "values",
    [
        {"shards": 0},
        {"lease_s": math.nan},
        {"status_port": 70000},
        {"max_memory_bytes": 0},
        {"durability": "snapshot"},
        {"durability": "memory", "snapshot_dir": Path("x")},
        {"bind": "127.0.0.1:7077"},
        {"bind": "tcp://127.0.0.1:65535", "shards": 2},
        {"bind": "udp://127.0.0.1:1"},
        {"bind": "ipc://" + "x" * 108},
        {"bind": "tcp://a b:1"},
    ],
)
def test_out_of_bounds_is_refused(values):
    with pytest.raises(ConfigurationError, match=r"expected .*got"):
        make_settings(values)


def test_addresses_of_the_shards():
    for bind, shards, addresses in (
        ("tcp://127.0.0.1:7077", 2, ["tcp://127.0.0.1:7077", "tcp://127.0.0.1:7078"]),
        ("tcp://127.0.0.1:0", 2, ["tcp://127.0.0.1:*"] * 2),
        ("tcp://localhost:5", 1, ["tcp://127.0.0.1:5"]),  # zmq binds numbers, not names
        ("tcp://[::1]:5", 1, ["tcp://[::1]:5"]),
        ("ipc:///run/x", 3, ["ipc:///run/x", "ipc:///run/x-1", "ipc:///run/x-2"]),
    ):
        assert ServerSettings(bind=bind, shards=shards).bind_addresses() == addresses


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "[::]", "10.0.0.1", "eth0", "127.0.0.1.nip.io"])
def test_what_others_reach_needs_keys_or_the_word(host, tmp_path):
    bind = f"tcp://{host}:0"
    with pytest.raises(ConfigurationError, match=r"need keys.*keygen.*--insecure"):
        make_settings({"bind": bind})
    assert ServerSettings(bind=bind, insecure=True).is_wildcard == (host in ("0.0.0.0", "*", "[::]"))
    assert not ServerSettings(bind=bind, curve_key=tmp_path, allow=tmp_path).is_local


def test_keys_come_in_pairs_and_not_with_insecure(tmp_path):
    both = {"curve_key": tmp_path, "allow": tmp_path}
    for half in ({"curve_key": tmp_path}, {"allow": tmp_path}, {"secret_file": tmp_path, "admin_allow": tmp_path}):
        with pytest.raises(ConfigurationError, match="Keys need both sides"):
            make_settings(half)
    with pytest.raises(ConfigurationError, match="exclude each other"):
        make_settings({**both, "insecure": True})
    with pytest.raises(ConfigurationError, match="got curve_key and secret_file"):
        make_settings({**both, "secret_file": tmp_path})
    assert ServerSettings(bind="tcp://0.0.0.0:7077", secret_file=tmp_path).is_wildcard


def test_a_follower_needs_the_tier_another_address_and_an_elector(tmp_path):
    replica = {"durability": "replica", "election": "etcd=localhost:2379/one"}
    for values, words in (
        ({"follow": "tcp://a:1"}, "expected durability replica or log.replica with follow, got memory"),
        ({"election": "launcher=a", "snapshot_dir": tmp_path}, "with election, got snapshot"),
        ({"durability": "replica", "follow": "tcp://a:1"}, "--election etcd=HOST:PORT; or, on one machine, --election"),
        ({"durability": "log+replica", "snapshot_dir": tmp_path}, "got none.*election launcher=PATH"),
        ({**replica, "election": "operator"}, "expected launcher=PATH or etcd"),
        ({**replica, "election": "launcher=a", "etcd_ca": tmp_path}, "etcd_ca is for etcd over TLS"),
        ({**replica, "etcd_login": tmp_path}, "etcd_login is for etcd over TLS .*etcd_ca None"),
        ({"durability": "log+replica", "election": "etcd=a:1"}, "A server keeps what it has in a directory"),
        ({**replica, "bind": "tcp://127.0.0.1:7000", "shards": 2, "follow": "tcp://127.0.0.1:7001"}, "another one"),
        ({**replica, "election": "etcd=localhost"}, "expected launcher=PATH or etcd=HOST:PORT"),
        ({**replica, "election": "zookeeper=a:1"}, "got 'zookeeper=a:1'"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            make_settings(values)
    for election in ("etcd=[::1]:2379,b:2379", "etcd=etcd-0.etcd.svc:2379/model.1", "launcher=/tmp/a file"):
        assert make_settings({**replica, "election": election, "follow": "tcp://a:1"}).election == election
