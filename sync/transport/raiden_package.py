"""Finds Raiden's Python package, which has had two names.

"TPU Raiden" became "TPU Sync": current wheels are imported as `tpu_sync`,
early ones as `tpu_raiden`.
"""

import importlib
import types

NAMES = ("tpu_sync", "tpu_raiden")
NATIVE = "api.jax.weight_synchronizer"
FFI = "frameworks.jax.weight_synchronizer_ffi"


def load(module: str) -> types.ModuleType:
  """Imports one of Raiden's modules, under whichever name it is installed.

  Args:
    module: Dotted name inside the package.

  Returns:
    The module.

  Raises:
    ImportError: not installed, or installed and broken; with what was said
      under each name.
  """
  said = []
  for name in NAMES:
    try:
      return importlib.import_module(f"{name}.{module}")
    except ImportError as error:
      said.append(f"`{name}.{module}`: {error}")
  raise ImportError("; ".join(said))


def import_error(module: str) -> str | None:
  """Why a module cannot be imported, or None when it can."""
  try:
    load(module)
  except ImportError as error:
    return str(error)
  return None
