"""Shards: each has some of the chunks of every job, without clocks and sockets."""

from __future__ import annotations
