"""Finds ranks that died, and where ranks wait, through the rendezvous store.

May import ``tracing``.
"""
