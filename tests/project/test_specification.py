"""What users write to choose a strategy or a collective, and the names that programs register."""

import pytest

import psengine
from psengine.codecs.registry import CODECS
from psengine.collectives.registry import collective_for
from psengine.errors import ConfigurationError
from psengine.specification import Specification
from psengine.strategies.registry import PARTS, STRATEGIES, resolve_strategy
from psengine.strategies.sync_all_reduce import SyncAllReduce


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("sync", "sync", {}),
        ("a:x=1,y=0.5,z=text", "a", {"x": 1, "y": 0.5, "z": "text"}),
        ("a:x=true,y=False,z=none,w=", "a", {"x": True, "y": False, "z": None, "w": ""}),
        ("a: x = 1 , y=2,", "a", {"x": 1, "y": 2}),
        # A colon separates once, an address has more.
        ("a:servers=tcp://h:7077", "a", {"servers": "tcp://h:7077"}),
        ("a:servers=tcp://h:1,tcp://[::1]:2,x=4", "a", {"servers": ["tcp://h:1", "tcp://[::1]:2"], "x": 4}),
        ("a:servers=ipc:///x=1,ipc:///y=2,x=4", "a", {"servers": ["ipc:///x=1", "ipc:///y=2"], "x": 4}),
        ("a:layers=1,2,3", "a", {"layers": [1, 2, 3]}),
    ],
)
def test_specifications_are_parsed(text, name, options):
    specification = Specification.parse("strategy", text)
    assert (specification.name, dict(specification.options)) == (name, options)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:checksum", r"'a:checksum': options are written option=value \(got 'checksum'\)"),
        ("a:x=1,y=2,x=1", r"each option is given once \(got 'x' twice\)"),
        ("a:", r"'a:': options follow the colon \(expected a, or a:option=value, got nothing"),
    ],
)
def test_malformed_options_are_refused(text, message):
    with pytest.raises(ConfigurationError, match=message):
        Specification.parse("strategy", text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sync:every=8", r"every is an option of strategy 'local', 'diloco'(,| and) 'diloco-server'"),
        ("sync:shard_optimizer=yes", r"\(expected true or false, got 'yes'\)"),
        ("async:timeout_s=0", r"strategy 'async'.timeout_s: \(expected float > 0.0, got 0\)"),
        (
            "async:servers=localhost:70",
            r"\(expected tcp://host:port or .* got 'localhost:70'\). Did you mean tcp://loc",
        ),
        ("diloco-server:quorum=0", r"'diloco-server'.quorum: \(expected int >= 1, got 0\). Fix:"),
        ("async:staleness_scaling=log", r"\(expected one of inverse, got 'log'\). Fix:"),
        (
            "diloco-server:durability=disk",
            r"\(expected one of memory\|snapshot\|log\|replica\|log\+replica, got 'disk'\). Fix:",
        ),
        ("snyc", r"unknown strategy \(expected one of \['async', .*, got 'snyc'\)\. Did you mean sync\?"),
        ("sync:compress=pear", r"unknown codec \(expected one of \['bf16', .*, got 'pear'\)"),
        ("sync:compress=topk:ratio=2", r"expected compress=topk,ratio=2, got compress=topk:ratio=2\)"),
        (
            "sync:compress=topk,ratoi=2",
            r"of strategy 'sync', \['ratio', .* of codec 'topk', got ratoi=2\)\. Did you mean ratio\?",
        ),
    ],
)
def test_a_value_that_is_refused_comes_with_what_was_expected(text, message):
    with pytest.raises(ConfigurationError, match=message):
        resolve_strategy(text)


def test_a_codec_gets_the_options_that_the_strategy_does_not_name():
    assert repr(resolve_strategy("sync:compress=topk,ratio=0.5")) == "sync:compress=topk:ratio=0.5"


def test_an_option_that_is_text_stays_text_and_a_number_is_none():
    assert repr(resolve_strategy("async:job=7,servers=none")) == repr(psengine.AsyncServer(job="7"))
    with pytest.raises(ConfigurationError, match=r"'sync-server'.job: \(expected str \| null, got 7\)"):
        psengine.SyncServer(job=7)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("async", "async:job=j,servers=tcp://a:1"),
        ("async:servers=ipc:///job=1,ipc:///b", "async:servers=ipc:///job=1,ipc:///b,job=j"),
        ("async:job=a,servers=x,", "async:job=a,servers=x,"),
    ],
)
def test_options_that_are_not_given_are_added(text, expected):
    assert Specification.parse("strategy", text).with_options(job="j", servers="tcp://a:1") == expected


def test_no_option_has_two_owners():
    """An option goes to the strategy if it names one, else to its codec: a shared name would never reach the codec."""
    of_codecs = {option for name in CODECS for option in CODECS.options_of(name)}
    of_strategies = {option for name in STRATEGIES for option in STRATEGIES.options_of(name)}
    assert not of_codecs & of_strategies
    assert not set(PARTS) & of_codecs
    assert all(option in of_strategies for option in PARTS)


def test_registering_refuses_a_name_that_is_taken():
    with pytest.raises(ConfigurationError, match="strategy 'sync' is registered already"):
        psengine.register_strategy("sync", SyncAllReduce)
    with pytest.raises(ConfigurationError, match="collective 'auto' is registered already"):
        psengine.register_collective("auto", lambda process_group, device: None)


def test_options_of_collectives():
    with pytest.raises(ConfigurationError, match=r"unknown option 'x' \(expected no options of collective"):
        collective_for(None, "c10d:x=1")
    with pytest.raises(ConfigurationError, match=r"or a psengine.Collective, got 3\)"):
        collective_for(None, 3)
