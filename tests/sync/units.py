"""Work units and manifests as plain data: no arrays, no devices."""

import numpy as np

from laneweave.sync import rounds
from laneweave.sync.transport import base


def variable(name="w", ordinal=0, shape=(8, 4), shards=4, **changes):
  """One array, split over `shards` devices on its first axis."""
  return base.Variable(
    **{
      "name": name,
      "ordinal": ordinal,
      "shape": shape,
      "dtype": "bfloat16",
      "mesh_shape": (shards,) + (1,) * (len(shape) - 1),
      "sharding_spec": ("fsdp",) + ("",) * (len(shape) - 1),
      "global_shard_indices": tuple(range(shards)),
      **changes,
    }
  )


def unit(job="rollout", replica="0", shards=4, names=("b", "w"), **changes):
  """One side."""
  return base.WorkUnit(
    **{
      "job": job,
      "replica": replica,
      "endpoints": ("127.0.0.1:1",) * shards,
      "control_address": "127.0.0.1:2",
      "mesh_shape": (shards,),
      "mesh_axes": ("fsdp",),
      "linear_staging": True,
      "variables": tuple(
        variable(name, i, shards=shards) for i, name in enumerate(names)
      ),
      **changes,
    }
  )


def manifest(session, round_id=1, version=10, **changes):
  """A round of the arrays of `unit`."""
  variables = unit("trainer").variables
  return rounds.RoundManifest(
    **{
      "session": session,
      "round_id": round_id,
      "version": version,
      "seed": (1, 2),
      "variables": variables,
      "fingerprints": {
        v.name: np.array([v.ordinal, 7], np.uint32) for v in variables
      },
      **changes,
    }
  )
