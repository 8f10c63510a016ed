"""What one chip does to one parameter.

Shapes, tiles and lanes; no model, no mesh, no network. `reference` says in
NumPy what each function's answer is.
"""

from laneweave.kernels.fingerprint import fingerprint
from laneweave.kernels.fuse_gate_up import fuse_gate_up
from laneweave.kernels.pad_lanes import pad_lanes
from laneweave.kernels.repeat_heads import repeat_heads
from laneweave.kernels.unscan import unscan

__all__ = [
  "fingerprint",
  "fuse_gate_up",
  "pad_lanes",
  "repeat_heads",
  "unscan",
]
