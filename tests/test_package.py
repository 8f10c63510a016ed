"""The package as a whole: cheap to import, and complete."""

import subprocess
import sys

import laneweave


def test_importing_touches_nothing():
  code = """
import sys
import laneweave
assert "jax" not in sys.modules
assert "tpu_sync" not in sys.modules
assert "absl.flags" not in sys.modules
for name in laneweave.__all__:
  getattr(laneweave, name)
assert "tpu_sync" not in sys.modules
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
from absl import flags
assert "checkpoint" not in flags.FLAGS
"""
  subprocess.run([sys.executable, "-c", code], check=True)


def test_unknown_names_are_attribute_errors():
  assert not hasattr(laneweave, "nonsense")
  assert set(laneweave.__all__) <= set(dir(laneweave))
