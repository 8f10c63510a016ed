"""laneweave: moves a model's weights from the TPU mesh that trains it.

To the TPU meshes that roll it out, once per reinforcement-learning step. The
public names below are loaded when they are first used: importing the package
touches no device, imports no transport and reads no flag.
"""

import importlib
import typing

__version__ = "0.1.0"

_EXPORTS = {
  "RolloutSync": "laneweave.sync.session",
  "SyncConfig": "laneweave.sync.config",
  "TrainerSync": "laneweave.sync.session",
  "convert": "laneweave.sync.convert",
  "convert_reference": "laneweave.sync.reference",
  "convert_streaming": "laneweave.sync.convert",
  "make_plan": "laneweave.sync.plan",
  "manifest": "laneweave.sync.manifest",
}
_PACKAGES = ("kernels", "sync")

if typing.TYPE_CHECKING:
  from laneweave import kernels as kernels
  from laneweave import sync as sync
  from laneweave.sync.config import SyncConfig as SyncConfig
  from laneweave.sync.convert import convert as convert
  from laneweave.sync.convert import convert_streaming as convert_streaming
  from laneweave.sync.manifest import manifest as manifest
  from laneweave.sync.plan import make_plan as make_plan
  from laneweave.sync.reference import convert_reference as convert_reference
  from laneweave.sync.session import RolloutSync as RolloutSync
  from laneweave.sync.session import TrainerSync as TrainerSync

__all__ = [
  "RolloutSync",
  "SyncConfig",
  "TrainerSync",
  "__version__",
  "convert",
  "convert_reference",
  "convert_streaming",
  "kernels",
  "make_plan",
  "manifest",
  "sync",
]


def __getattr__(name: str) -> typing.Any:
  if name in _EXPORTS:
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
  elif name in _PACKAGES:
    value = importlib.import_module(f"laneweave.{name}")
  else:
    raise AttributeError(f"module 'laneweave' has no attribute {name!r}")
  globals()[name] = value
  return value


def __dir__() -> list[str]:
  return sorted(__all__)
