"""The real parameter trees cut down to a size that fits in memory.

Layers, cycles and the width of the experts' MLP axis stay what they are; the
other axes of one layer's array shrink to at most 2, 3 and 5. A trainer's leaf
is shrunk as its layers are, so both sides stay consistent.
"""

import gzip
import json
import pathlib
import re

import numpy as np

FOLDER = pathlib.Path(__file__).parent.parent / "data" / "manifests"
SMALL = (2, 3, 5)


def pairs():
  """(trainer file, rollout file) of every rollout manifest."""
  return [
    (FOLDER / f"{path.name.split('.rollout')[0]}.trainer.json.gz", path)
    for path in sorted(FOLDER.glob("*.rollout*.json.gz"))
  ]


def load(path):
  with gzip.open(path, "rt") as f:
    return json.load(f)


def small_block(name, shape):
  """One layer's shape, shrunk."""
  last = name.rpartition(".")[2]
  kept = {"wi": -1, "wi_0": -1, "wi_1": -1, "wo": -2}.get(last)
  kept = None if kept is None else kept % len(shape)
  return tuple(
    length if axis == kept else min(length, SMALL[axis])
    for axis, length in enumerate(shape)
  )


def stacked_axes(name):
  """Stacked axes of a trainer's leaf in these files, outermost first."""
  if ".layers_remainder." in name:
    return ()
  parts = name.split(".")
  if not {"layers", "scanned_blocks", "dense_layers", "moe_layers"} & set(
    parts
  ):
    return ()
  if name.endswith("MoeBlock_0.gate.bias"):
    return (0,)
  return (1, 2) if "local_layers" in parts else (1,)


def small_trainer(manifest):
  """Arrays of a trainer manifest, zero-stride: they take no memory.

  Returns:
    {name: array whose every layer holds its own number: 10000 times its slot
    in a cycle (9 for `global_layer`), plus 100 times the position on the outer
    stacked axis, plus that on the inner one}.
  """
  arrays = {}
  for leaf in manifest["leaves"]:
    name, shape = leaf["path"], leaf["shape"]
    axes = stacked_axes(name)
    block = iter(
      small_block(name, [n for a, n in enumerate(shape) if a not in axes])
    )
    shape = tuple(n if a in axes else next(block) for a, n in enumerate(shape))
    slot = re.search(r"\.layers?_(\d+)\.", name)
    slot = 9 if ".global_layer." in name else int(slot[1]) if slot else 0
    number = np.full((), 10000 * slot, leaf["dtype"])
    for axis, scale in zip(axes, (100, 1), strict=False):
      index = np.arange(shape[axis], dtype=leaf["dtype"]) * scale
      number = number + index.reshape(
        [-1 if a == axis else 1 for a in range(len(shape))]
      )
    arrays[name] = np.broadcast_to(number, shape)
  return arrays


def small_rollout(manifest):
  """{name: (shape, dtype name)} of a rollout manifest."""
  return {
    leaf["path"]: (small_block(leaf["path"], leaf["shape"]), leaf["dtype"])
    for leaf in manifest["leaves"]
  }
