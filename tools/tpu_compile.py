"""Compiles kernels for one TPU generation, with no TPU attached.

    python -m laneweave.tools.tpu_compile --target=v5e [--cases=small]

prints one JSON array of rows: what the real TPU compiler made of each layout.
Nothing runs and no device memory is taken. One target per process: libtpu
reads its environment when it is imported, so the process starts itself anew
with the right one.
"""

import json
import os
import re
import subprocess
import sys
from typing import Any

from absl import app, flags

from laneweave.tools import targets

_TARGET = flags.DEFINE_enum(
  "target", "v5e", sorted(targets.TARGETS), "TPU generation to compile for."
)
_CASES = flags.DEFINE_enum(
  "cases",
  "small",
  ["small", "real"],
  "small: seconds per target, every operation and dtype pair; real: sizes of"
  " published models.",
)

_READY = "LANEWEAVE_TPU_COMPILE_READY"
# HLO instructions that move an array and are not the kernel: a relayout before
# or after it, which reads and writes HBM once more.
_COPIES = re.compile(r"= \S+ (?:copy|copy-start|transpose|fusion)\(")


def compile_layout(layout, device, printing: bool) -> dict[str, Any]:
  """Compiles one layout for one device.

  Args:
    layout: A `kernels.layout.Layout`.
    device: A device of a topology description.
    printing: With the fingerprint.

  Returns:
    `temp_bytes`, `copies` and `launches` of the whole compiled program.
  """
  # Imported here, after the environment is set: libtpu reads it on import.
  import jax
  import jax.numpy as jnp
  from jax.sharding import AbstractDevice, AbstractMesh, SingleDeviceSharding

  from laneweave.kernels import mosaic

  one = SingleDeviceSharding(device)
  source = jax.ShapeDtypeStruct(layout.shape, layout.source_dtype, sharding=one)
  bases = jax.ShapeDtypeStruct(
    (2 * len(layout.out_shape),), jnp.uint32, sharding=one
  )

  def run(bases, *sources):
    return mosaic.relayout(layout, *sources, bases=bases if printing else None)

  kind = AbstractDevice(
    device_kind=device.device_kind, num_cores=None, platform="tpu"
  )
  with jax.sharding.use_abstract_mesh(
    AbstractMesh((), (), abstract_device=kind)
  ):
    compiled = (
      jax.jit(run).trace(bases, *([source] * layout.operands)).lower().compile()
    )
  text = compiled.as_text() or ""
  return {
    "temp_bytes": compiled.memory_analysis().temp_size_in_bytes,
    "copies": len(_COPIES.findall(text)),
    "launches": text.count('custom_call_target="tpu_custom_call"'),
  }


def rows(target: str, cases: str) -> list[dict[str, Any]]:
  """Compiles all cases, with and without the fingerprint.

  Args:
    target: A key of `targets.TARGETS`.
    cases: "small" or "real".

  Returns:
    A row per case and form; one that does not compile has an `error`.
  """
  from jax.experimental import topologies

  from laneweave.tools import cases as cases_lib

  topology = topologies.get_topology_desc(
    platform="tpu", topology_name=targets.TARGETS[target].topology
  )
  found = []
  for case in cases_lib.SMALL if cases == "small" else cases_lib.REAL:
    for printing in (False, True):
      row = {
        "target": target,
        "op": case.op,
        "case": case.name,
        "shape": list(case.layout.shape),
        "dtypes": [case.layout.source_dtype.name, case.layout.dtype.name],
        "fingerprint": printing,
      }
      try:
        row.update(compile_layout(case.layout, topology.devices[0], printing))
      except (RuntimeError, ValueError, NotImplementedError) as error:
        row["error"] = str(error).splitlines()[0]
      found.append(row)
  return found


def main(argv: list[str]) -> None:
  """Prints the rows of one target as JSON."""
  del argv
  if os.environ.get(_READY) != _TARGET.value:
    env = targets.environment(targets.TARGETS[_TARGET.value])
    env[_READY] = _TARGET.value
    command = [sys.executable, "-m", "laneweave.tools.tpu_compile"]
    done = subprocess.run([*command, *sys.argv[1:]], env=env, check=False)
    sys.exit(done.returncode)
  print(json.dumps(rows(_TARGET.value, _CASES.value), indent=1))


if __name__ == "__main__":
  app.run(main)
