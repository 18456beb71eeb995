"""One HTTP port to read from, of a server and of a training process, for people and Prometheus.

What it serves is given to it. Imports nothing of the package.
"""
