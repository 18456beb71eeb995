"""Whole jobs in one thread under one clock: real shards and real clients, simulated network, disk and faults."""
