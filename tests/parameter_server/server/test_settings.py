from __future__ import annotations

import math
from dataclasses import fields
from pathlib import Path

import pytest

from psengine.errors import ConfigurationError
from psengine.parameter_server.server.settings import ServerSettings, describe_settings, parse_size


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    for setting in fields(ServerSettings):
        monkeypatch.delenv(f"PSENGINE_{setting.name.upper()}", raising=False)
    monkeypatch.delenv("PSENGINE_CONFIG", raising=False)


def write(tmp_path, text):
    path = tmp_path / "server.toml"
    path.write_text(text)
    return path


def test_defaults_listen_on_loopback_only():
    settings = ServerSettings.load()
    assert settings == ServerSettings()
    assert settings.bind == "tcp://127.0.0.1:7077"
    assert settings.is_local
    assert not settings.insecure
    assert settings.heartbeat_s == 1.0
    assert settings.snapshot_dir is None
    assert settings.status_port is None


def test_argument_beats_environment_beats_file_beats_default(tmp_path, monkeypatch):
    config = write(tmp_path, 'shards = 2\nlease_s = 7\nlog_format = "json"\nsnapshot_interval_s = 1.5\n')
    monkeypatch.setenv("PSENGINE_SHARDS", "3")
    monkeypatch.setenv("PSENGINE_LEASE_S", "8.5")
    settings = ServerSettings.load({"shards": "4", "lease_s": None}, config=config)
    assert (settings.shards, settings.lease_s, settings.log_format) == (4, 8.5, "json")
    assert settings.snapshot_interval_s == 1.5
    assert settings.status_port is None


def test_the_file_may_be_named_by_a_variable(tmp_path, monkeypatch):
    monkeypatch.setenv("PSENGINE_CONFIG", str(write(tmp_path, "shards = 5")))
    assert ServerSettings.load().shards == 5


def test_every_setting_can_be_given_in_each_way(tmp_path, monkeypatch):
    values = {
        "bind": "tcp://0.0.0.0:9000",
        "shards": 2,
        "snapshot_dir": str(tmp_path),
        "snapshot_interval_s": 10.0,
        "lease_s": 2.0,
        "status_port": 9100,
        "status_token": str(tmp_path / "token"),
        "curve_key": None,
        "allow": None,
        "secret_file": None,
        "insecure": True,
        "max_memory_bytes": "2GiB",
        "plugins": "json,os.path",
        "log_format": "json",
    }
    assert list(values) == [setting.name for setting in fields(ServerSettings)]
    given = {name: value for name, value in values.items() if value is not None}
    by_argument = ServerSettings.load({name: str(value) for name, value in given.items()})
    toml = [f"{name} = {str(v).lower() if isinstance(v, int | float) else repr(v)}" for name, v in given.items()]
    by_file = ServerSettings.load(config=write(tmp_path, "\n".join(toml)))
    for name, value in given.items():
        monkeypatch.setenv(f"PSENGINE_{name.upper()}", str(value))
    by_variable = ServerSettings.load()
    assert by_argument == by_file == by_variable
    assert by_argument.max_memory_bytes == 2 << 30
    assert by_argument.snapshot_dir == Path(tmp_path)


def test_unknown_names_in_the_file_are_refused_with_the_likely_one(tmp_path):
    with pytest.raises(ConfigurationError, match=r"got 'snapshot-dirs'.*did you mean snapshot_dir\?"):
        ServerSettings.load(config=write(tmp_path, "snapshot-dirs = '/x'"))
    with pytest.raises(ConfigurationError, match="Known: bind, shards"):
        ServerSettings.load(config=write(tmp_path, "colour = 'red'"))


@pytest.mark.parametrize("text", ["shards = ", "[[[", "shards = 1\nshards = 2"])
def test_a_broken_file_is_refused(tmp_path, text):
    with pytest.raises(ConfigurationError, match=r"server\.toml cannot be read"):
        ServerSettings.load(config=write(tmp_path, text))
    with pytest.raises(ConfigurationError, match="cannot be read"):
        ServerSettings.load(config=tmp_path / "absent.toml")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("shards", "two"),
        ("shards", "1.5"),
        ("lease_s", "soon"),
        ("status_port", ""),
        ("insecure", "perhaps"),
        ("max_memory_bytes", "8 elephants"),
        ("max_memory_bytes", "-1"),
        ("bind", " "),
    ],
)
def test_what_is_no_such_value_names_its_source(monkeypatch, name, text):
    with pytest.raises(ConfigurationError, match=rf"--{name.replace('_', '-')} is not understood \(expected .*, got"):
        ServerSettings.load({name: text})
    if text.strip():
        monkeypatch.setenv(f"PSENGINE_{name.upper()}", text)
        with pytest.raises(ConfigurationError, match=f"PSENGINE_{name.upper()} is not understood"):
            ServerSettings.load()


@pytest.mark.parametrize(
    "values",
    [
        {"shards": 0},
        {"shards": 257},
        {"lease_s": 0.1},
        {"lease_s": math.nan},
        {"lease_s": math.inf},
        {"snapshot_interval_s": -1.0},
        {"snapshot_interval_s": math.nan},
        {"status_port": 70000},
        {"status_port": -1},
        {"max_memory_bytes": 0},
        {"log_format": "xml"},
        {"bind": "127.0.0.1:7077"},
        {"bind": "tcp://127.0.0.1"},
        {"bind": "tcp://127.0.0.1:99999"},
        {"bind": "tcp://127.0.0.1:65535", "shards": 2},
        {"bind": "udp://127.0.0.1:1"},
        {"bind": "inproc://here"},
        {"bind": "ipc://*"},
        {"bind": "ipc://" + "x" * 108},
        {"bind": "tcp://a b:1"},
    ],
)
def test_out_of_bounds_is_refused(values):
    with pytest.raises(ConfigurationError, match=r"expected .*got"):
        ServerSettings(**values)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("8GiB", 8 << 30),
        ("8 gib", 8 << 30),
        ("1.5MiB", 3 << 19),
        ("2GB", 2 * 10**9),
        ("3kB", 3000),
        ("7b", 7),
        (512, 512),
    ],
)
def test_sizes(text, size_bytes):
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "GiB", "8 G i B", "8XiB", "1e9", "-8GiB", "0x10", True, None, 1.5])
def test_no_sizes(text):
    with pytest.raises(ValueError, match="size"):
        parse_size(text)


def test_addresses_of_the_shards():
    def addresses(bind, shards=3):
        return ServerSettings(bind=bind, shards=shards).bind_addresses()

    assert addresses("tcp://127.0.0.1:7077") == [f"tcp://127.0.0.1:{port}" for port in (7077, 7078, 7079)]
    assert addresses("tcp://127.0.0.1:0") == ["tcp://127.0.0.1:*"] * 3
    assert addresses("tcp://localhost:5", 1) == ["tcp://127.0.0.1:5"]  # zmq binds numbers, not names
    assert addresses("tcp://[::1]:5", 1) == ["tcp://[::1]:5"]
    assert addresses("ipc:///run/x") == ["ipc:///run/x", "ipc:///run/x-1", "ipc:///run/x-2"]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "localhost", "[::1]"])
def test_loopback_needs_no_keys(host):
    settings = ServerSettings(bind=f"tcp://{host}:0")
    assert settings.is_local
    assert not settings.is_wildcard


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "[::]", "10.0.0.1", "eth0", "example.com", "127.0.0.1.nip.io", "lo"])
def test_what_others_reach_needs_keys_or_the_word(host, tmp_path):
    bind = f"tcp://{host}:0"
    with pytest.raises(ConfigurationError, match=r"need keys.*keygen.*--insecure"):
        ServerSettings(bind=bind)
    assert ServerSettings(bind=bind, insecure=True).is_wildcard == (host in ("0.0.0.0", "*", "[::]"))
    assert not ServerSettings(bind=bind, curve_key=tmp_path, allow=tmp_path).is_local


def test_keys_come_in_pairs_and_not_with_insecure(tmp_path):
    for half in ({"curve_key": tmp_path}, {"allow": tmp_path}):
        with pytest.raises(ConfigurationError, match="Keys need both sides"):
            ServerSettings(**half)
    with pytest.raises(ConfigurationError, match="exclude each other"):
        ServerSettings(curve_key=tmp_path, allow=tmp_path, insecure=True)
    with pytest.raises(ConfigurationError, match="got curve_key and secret_file"):
        ServerSettings(curve_key=tmp_path, allow=tmp_path, secret_file=tmp_path)
    assert ServerSettings(bind="tcp://0.0.0.0:7077", secret_file=tmp_path).is_wildcard


def test_every_setting_is_described():
    described = describe_settings()
    assert list(described) == [setting.name for setting in fields(ServerSettings)]
    for name, (explanation, default) in described.items():
        assert explanation.endswith((".", "machine's."))
        assert default == getattr(ServerSettings(), name)
