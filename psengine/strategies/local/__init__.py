"""Strategies "local" and "diloco": replicas step by themselves, and synchronise now and then."""
