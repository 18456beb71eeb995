"""Strategies "local" and "diloco": replicas step by themselves, and agree now and then."""

__all__: list[str] = []
