from __future__ import annotations

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
    monkeypatch.delenv("PSENGINE_CONFIG", raising=False)


def write(tmp_path, text):
    path = tmp_path / "server.toml"
    path.write_text(text)
    return path


def settings_of(*arguments):
    """The settings of a command line."""
    found = []
    build_app(lambda settings, *_: found.append(settings) or 0)(list(map(str, arguments)), standalone_mode=False)
    return found[0]


def test_argument_beats_environment_beats_file_beats_default(tmp_path, monkeypatch):
    config = write(tmp_path, 'shards = 2\nlease_s = 7\nlog_format = "json"\nsnapshot_interval_s = 1.5\n')
    monkeypatch.setenv("PSENGINE_SHARDS", "3")
    monkeypatch.setenv("PSENGINE_LEASE_S", "8.5")
    monkeypatch.setenv("PSENGINE_STATUS_PORT", "")
    settings = settings_of("--config", config, "--shards", 4)
    assert (settings.shards, settings.lease_s, settings.log_format) == (4, 8.5, "json")
    assert (settings.snapshot_interval_s, settings.status_port) == (1.5, None)
    monkeypatch.setenv("PSENGINE_CONFIG", str(config))
    assert settings_of("--shards", 4) == settings


def test_every_setting_can_be_given_in_each_way(tmp_path, monkeypatch):
    values = {
        "bind": "tcp://0.0.0.0:9000",
        "shards": 2,
        "snapshot_dir": str(tmp_path),
        "snapshot_interval_s": 10.0,
        "durability": "log",
        "lease_s": 2.0,
        "status_port": 9100,
        "status_bind": "127.0.0.2",
        "curve_key": None,
        "allow": None,
        "secret_file": None,
        "admin_allow": None,
        "admin_secret_file": None,
        "insecure": True,
        "max_memory_bytes": "2GiB",
        "plugins": "json,os.path",
        "log_format": "json",
    }
    assert list(values) == list(ServerSettings.model_fields)
    given = {name: value for name, value in values.items() if value is not None}
    flags = {f"--{name.replace('_', '-')}": value for name, value in given.items()}
    by_argument = settings_of(*(part for item in flags.items() for part in item if part is not True))
    toml = [f"{name} = {str(v).lower() if isinstance(v, int | float) else repr(v)}" for name, v in given.items()]
    by_file = settings_of("--config", write(tmp_path, "\n".join(toml)))
    for name, value in given.items():
        monkeypatch.setenv(f"PSENGINE_{name.upper()}", str(value))
    assert by_argument == by_file == settings_of()
    assert by_argument.max_memory_bytes == 2 << 30
    assert by_argument.snapshot_dir == Path(tmp_path)
    assert by_argument.plugins == ("json", "os.path")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("snapshot-dirs = '/x'", r"server\.toml: there is no setting 'snapshot-dirs'.*did you mean snapshot_dir\?"),
        ("colour = 'red'", "Known: bind, shards"),
        ("shards = ", r"server\.toml cannot be read"),
        (None, r"server\.toml cannot be read"),
    ],
)
def test_a_file_that_is_not_understood_is_refused(tmp_path, text, words):
    path = tmp_path / "server.toml" if text is None else write(tmp_path, text)
    with pytest.raises(ConfigurationError, match=words):
        settings_of("--config", path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("shards", "two"),
        ("status_port", ""),
        ("snapshot_dir", ""),
        ("max_memory_bytes", "8 elephants"),
        ("plugins", "not a module"),
    ],
)
def test_what_is_no_such_value_is_refused(tmp_path, name, text):
    option = f"--{name.replace('_', '-')}"
    with pytest.raises(ConfigurationError, match=rf"^{option}: {name} is not understood \(expected .*, got '{text}'\)"):
        settings_of(f"{option}={text}")
    with pytest.raises(ConfigurationError, match=rf"server\.toml: {name} is not understood .*got '{text}'\)"):
        settings_of("--config", write(tmp_path, f"{name} = '{text}'"))


@pytest.mark.parametrize(
    "values",
    [
        {"shards": 0},
        {"lease_s": 0.1},
        {"lease_s": math.nan},
        {"snapshot_interval_s": -1.0},
        {"status_port": 70000},
        {"max_memory_bytes": 0},
        {"log_format": "xml"},
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
    def addresses(bind, shards=3):
        return ServerSettings(bind=bind, shards=shards).bind_addresses()

    assert addresses("tcp://127.0.0.1:7077") == [f"tcp://127.0.0.1:{port}" for port in (7077, 7078, 7079)]
    assert addresses("tcp://127.0.0.1:0") == ["tcp://127.0.0.1:*"] * 3
    assert addresses("tcp://localhost:5", 1) == ["tcp://127.0.0.1:5"]  # zmq binds numbers, not names
    assert addresses("tcp://[::1]:5", 1) == ["tcp://[::1]:5"]
    assert addresses("ipc:///run/x") == ["ipc:///run/x", "ipc:///run/x-1", "ipc:///run/x-2"]


@pytest.mark.parametrize("host", ["0.0.0.0", "*", "[::]", "10.0.0.1", "eth0", "127.0.0.1.nip.io"])
def test_what_others_reach_needs_keys_or_the_word(host, tmp_path):
    bind = f"tcp://{host}:0"
    with pytest.raises(ConfigurationError, match=r"need keys.*keygen.*--insecure"):
        make_settings({"bind": bind})
    assert ServerSettings(bind=bind, insecure=True).is_wildcard == (host in ("0.0.0.0", "*", "[::]"))
    assert not ServerSettings(bind=bind, curve_key=tmp_path, allow=tmp_path).is_local


def test_keys_come_in_pairs_and_not_with_insecure(tmp_path):
    both = {"curve_key": tmp_path, "allow": tmp_path}
    for half in ({"curve_key": tmp_path}, {"allow": tmp_path}):
        with pytest.raises(ConfigurationError, match="Keys need both sides"):
            make_settings(half)
    with pytest.raises(ConfigurationError, match="exclude each other"):
        make_settings({**both, "insecure": True})
    with pytest.raises(ConfigurationError, match="got curve_key and secret_file"):
        make_settings({**both, "secret_file": tmp_path})
    assert ServerSettings(bind="tcp://0.0.0.0:7077", secret_file=tmp_path).is_wildcard


# ---- where a value came from -----------------------------------------------------------------------------------------


def test_a_variable_that_overrides_the_file_is_told(tmp_path, monkeypatch):
    told = []
    config = write(tmp_path, "shards = 2\nlease_s = 7\n")
    monkeypatch.setenv("PSENGINE_SHARDS", "3")
    monkeypatch.setenv("PSENGINE_STATUS_PORT", "9")
    app = build_app(lambda settings, embedded, descriptor, overrides: told.extend(overrides) or 0)
    app(["--config", str(config), "--lease-s", "8"], standalone_mode=False)
    assert told == [f"the variable PSENGINE_SHARDS overrides shards = 2 of {config}"]


def test_a_wrong_value_elsewhere_is_not(tmp_path, monkeypatch):
    config = write(tmp_path, "shards = 2\n")
    with pytest.raises(ConfigurationError, match=r"^--shards: shards is not understood"):
        settings_of("--config", config, "--shards", 0)
    monkeypatch.setenv("PSENGINE_SHARDS", "0")
    with pytest.raises(ConfigurationError, match=r"^PSENGINE_SHARDS: shards is not understood"):
        settings_of("--config", config)


def test_operators_are_named_beside_workers(tmp_path):
    for name in ("admin_allow", "admin_secret_file"):
        with pytest.raises(ConfigurationError, match=f"{name} names operators beside the workers"):
            make_settings({name: tmp_path})
