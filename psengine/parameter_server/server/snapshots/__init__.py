"""Generations of a server's state on disk; nothing that is read is believed unchecked.

May import ``log``, ``protocol`` and ``errors``.
"""
