"""Runs the test file that a Bazel target names."""

import sys

import pytest

if __name__ == "__main__":
  sys.exit(pytest.main(["--import-mode=importlib", *sys.argv[1:]]))
