"""TPU generations that kernels are compiled for without one attached.

Bandwidth and clock are assumptions used by models, with their sources:
HBM bandwidth of v5e (819 GB/s), v5p (2765), v6e (1640) and TPU7x (7380 per
chip, two JAX devices each) are Google's published figures; the clocks of v5e
and v5p follow from published peak FLOP/s, those of v6e and TPU7x are
estimates.
"""

import dataclasses
import os


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
  """One generation.

  Attributes:
    topology: Name of a four-chip topology, as libtpu spells it.
    accelerator_type: Value of TPU_ACCELERATOR_TYPE.
    device_kind: What JAX calls the device.
    cores: TensorCores per JAX device.
    hbm_bytes_per_s: HBM bandwidth per JAX device.
    clock_hz: TensorCore clock.
  """

  topology: str
  accelerator_type: str
  device_kind: str
  cores: int
  hbm_bytes_per_s: float
  clock_hz: float


TARGETS = {
  "v5e": Target(
    topology="v5e:2x2",
    accelerator_type="v5litepod-4",
    device_kind="TPU v5 lite",
    cores=1,
    hbm_bytes_per_s=819e9,
    clock_hz=1.5e9,
  ),
  "v5p": Target(
    topology="v5p:2x2x1",
    accelerator_type="v5p-8",
    device_kind="TPU v5",
    cores=2,
    hbm_bytes_per_s=2765e9,
    clock_hz=1.75e9,
  ),
  "v6e": Target(
    topology="v6e:2x2",
    accelerator_type="v6e-4",
    device_kind="TPU v6 lite",
    cores=1,
    hbm_bytes_per_s=1640e9,
    clock_hz=1.75e9,
  ),
  "tpu7x": Target(
    topology="TPU7x:2x2x1",
    accelerator_type="tpu7x-8",
    device_kind="TPU7x",
    cores=1,
    hbm_bytes_per_s=3690e9,
    clock_hz=1.9e9,
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
