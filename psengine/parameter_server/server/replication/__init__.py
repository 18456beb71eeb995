"""A server that has a second: who leads, and what the other one has."""
