"""TPU generations that kernels are compiled for without one attached.

What each generation's chip is stands in `kernels.chips`; here is what libtpu
must be told to compile for it.
"""

import dataclasses
import os

from laneweave.kernels import chips


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
  """One generation.

  Attributes:
    chip: Facts about it.
    topology: Name of a four-chip topology, as libtpu spells it.
    accelerator_type: Value of TPU_ACCELERATOR_TYPE.
  """

  chip: chips.Chip
  topology: str
  accelerator_type: str


TARGETS = {
  "v5e": Target(
    chip=chips.CHIPS["v5e"],
    topology="v5e:2x2",
    accelerator_type="v5litepod-4",
  ),
  "v5p": Target(
    chip=chips.CHIPS["v5p"],
    topology="v5p:2x2x1",
    accelerator_type="v5p-8",
  ),
  "v6e": Target(
    chip=chips.CHIPS["v6e"],
    topology="v6e:2x2",
    accelerator_type="v6e-4",
  ),
  "tpu7x": Target(
    chip=chips.CHIPS["tpu7x"],
    topology="TPU7x:2x2x1",
    accelerator_type="tpu7x-8",
  ),
}


def environment(target: Target, dump_dir: str | None = None) -> dict[str, str]:
  """Environment of a process that compiles for a target; one per process.

  Args:
    target: The generation.
    dump_dir: Folder for the kernels' final bundles, or None.

  Returns:
    The current environment with what libtpu reads on import added.
  """
  env = dict(os.environ)
  env.update(
    JAX_PLATFORMS="cpu",
    TPU_SKIP_MDS_QUERY="1",
    TPU_WORKER_HOSTNAMES="localhost",
    TPU_ACCELERATOR_TYPE=target.accelerator_type,
    # Two compilers at once would otherwise stop at libtpu's lock file.
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",
  )
  if dump_dir is not None:
    env["LIBTPU_INIT_ARGS"] = (
      f"--xla_jf_dump_to={dump_dir} --xla_jf_dump_llo_text=true"
      " --xla_jf_dump_llo_pass_label_regex=final_bundles"
    )
  return env
