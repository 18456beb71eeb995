"""Frames and messages between clients and servers, checked; pure: no sockets, no clock.

May import ``errors``.
"""
