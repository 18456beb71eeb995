"""The data of a training with virtual workers: which samples each one takes in a step, and with which random numbers.

May import what ``data`` may.
"""
