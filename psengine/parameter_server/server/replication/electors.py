"""The electors, by the names that ``--election`` has for them."""

from __future__ import annotations

from pathlib import Path

from psengine.parameter_server.server.replication.election import Elector, Member
from psengine.parameter_server.server.replication.etcd import EtcdElector
from psengine.parameter_server.server.replication.record_file import FileElector
from psengine.parameter_server.server.replication.succession import Succession
from psengine.parameter_server.server.settings import OPERATOR, ServerSettings


def make_elector(settings: ServerSettings) -> Elector:
    """The one of these settings. An operator's is a record in the server's own directory."""
    kind, _, place = settings.elector.partition("=")
    if kind == "etcd":
        host, _, name = place.partition("/")
        return EtcdElector(host, name or "default", settings.lease_s)
    if kind == "launcher":
        return FileElector(Path(place))
    assert settings.snapshot_dir is not None
    return FileElector(settings.snapshot_dir / "leadership")


def make_succession(settings: ServerSettings, own: Member) -> Succession:
    """What decides, given the elector's record, what this life of a server is."""
    is_operated = settings.elector == OPERATOR
    return Succession(own, lease_s=settings.lease_s, follow=settings.follow or "", is_operated=is_operated)
