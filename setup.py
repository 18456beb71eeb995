"""Build script; the metadata lives in pyproject.toml and the native extension is added here."""

from setuptools import setup

setup()
