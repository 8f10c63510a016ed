"""How long a round takes, beside what Raiden alone takes for the same bytes.

    python -m laneweave.tools.round_benchmark [--megabytes=500] [--rounds=6]

Two processes on this machine: a trainer whose float32 model becomes
`--megabytes` of bfloat16 on a rollout. Measured in one run, on random weights
that change every round:

* raiden: D2H, transfer and H2D of the converted arrays, nothing else;
* round: everything from `prepare` to `published`, with conversion,
  fingerprints on both sides and their check.

Prints each round and, as the last line, one JSON object with the medians of
warm rounds (the second on), their ratio, and resident memory after each
round.
"""

import json
import multiprocessing
import os
import statistics
import time
from typing import Any

from absl import app, flags

_MEGABYTES = flags.DEFINE_integer(
  "megabytes", 500, "Size of the rollout's model in MB (1e6 bytes).", 8
)
_ROUNDS = flags.DEFINE_integer("rounds", 6, "Rounds of each kind.", 2)
_PARALLELISM = flags.DEFINE_integer(
  "parallelism", 8, "Raiden's network streams.", 1
)
_BACKEND = flags.DEFINE_string(
  "kernel_backend", "auto", "auto, mosaic, interpret or xla."
)
_LAYERS = 12


def _set_up(devices: int) -> None:
  """Virtual CPU devices, where there is no accelerator."""
  os.environ.setdefault("JAX_PLATFORMS", "cpu")
  os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + f" --xla_force_host_platform_device_count={devices}"
  )


def _shapes(megabytes: int) -> dict[str, tuple[int, ...]]:
  """A Qwen3-MoE-like trainer's tree whose bfloat16 form has this size."""
  embed, heads, experts, mlp = 1024, 8, 8, 512
  layer = embed * 128 * heads * 3 + 3 * experts * embed * mlp + embed * experts
  vocab = (megabytes * 500_000 - _LAYERS * layer) // (2 * embed)
  vocab = max(vocab // 128 * 128, 128)
  n = _LAYERS
  return {
    "token_embedder.embedding": (vocab, embed),
    "decoder.logits_dense.kernel": (embed, vocab),
    "decoder.decoder_norm.scale": (embed,),
    "decoder.layers.self_attention.query.kernel": (embed, n, heads, 128),
    "decoder.layers.self_attention.key.kernel": (embed, n, heads // 2, 128),
    "decoder.layers.self_attention.value.kernel": (embed, n, heads // 2, 128),
    "decoder.layers.self_attention.out.kernel": (heads, n, 128, embed),
    "decoder.layers.pre_self_attention_layer_norm.scale": (embed, n),
    "decoder.layers.moe_block.gate.kernel": (embed, n, experts),
    "decoder.layers.moe_block.wi_0": (experts, n, embed, mlp),
    "decoder.layers.moe_block.wi_1": (experts, n, embed, mlp),
    "decoder.layers.moe_block.wo": (experts, n, mlp, embed),
  }


def _config():
  from laneweave.sync.config import SyncConfig

  return SyncConfig(
    num_decoder_layers=_LAYERS,
    prefuse_moe_weights=True,
    padded_base_moe_mlp_dim=512,
    moe_mlp_tp_size=2,
    base_num_kv_heads=4,
    kernel_backend=_BACKEND.value,
  )


def _rollout_target(megabytes: int) -> dict[str, Any]:
  """Shapes and shardings of the rollout, mesh fsdp=2, tp=2."""
  import jax
  from jax.sharding import NamedSharding, PartitionSpec
  import numpy as np

  from laneweave.sync.plan import make_plan

  tree = {
    name: jax.ShapeDtypeStruct(shape, np.float32)
    for name, shape in _shapes(megabytes).items()
  }
  devices = np.array(jax.devices()[:4]).reshape(2, 2)
  mesh = jax.sharding.Mesh(devices, ("fsdp", "tp"))
  target = {}
  for name, x in make_plan(tree, _config()).outputs().items():
    spec: list[str | None] = [None] * len(x.shape)
    if len(spec) > 1:
      spec[-2], spec[-1] = "fsdp", "tp"
    target[name] = jax.ShapeDtypeStruct(
      x.shape,
      x.dtype,
      sharding=NamedSharding(mesh, PartitionSpec(*spec)),
    )
  return target


def _rollout_process(pipe, flag_values) -> None:
  """Answers the trainer's process: raw loads, then a session."""
  flags.FLAGS(["round_benchmark", *flag_values])
  _set_up(4)
  import jax.numpy as jnp
  import psutil

  from laneweave.sync import rollout
  from laneweave.sync.transport import create

  target = _rollout_target(_MEGABYTES.value)
  raw = create.endpoint(
    "raiden",
    job="rollout",
    replica="raw",
    parallelism=_PARALLELISM.value,
    bind_ip="127.0.0.1",
  )
  raw.bind(
    {
      n: jnp.zeros(x.shape, x.dtype, device=x.sharding)
      for n, x in target.items()
    }
  )
  pipe.send(raw.work_unit())
  while pipe.recv() == "load":
    start = time.perf_counter()
    raw.load()
    pipe.send(time.perf_counter() - start)
  raw.close()
  session = rollout.RolloutSync(
    target,
    cfg=_config(),
    control_address=pipe.recv(),
    parallelism=_PARALLELISM.value,
  )
  session.join(120)
  while (manifest := session.next_round(120)) is not None:
    session.bind(manifest)
    session.receive(120)
    if wrong := session.verify():
      session.abort(f"{len(wrong)} arrays differ")
    else:
      session.publish()
    pipe.send(psutil.Process().memory_info().rss)
  session.close()


def _weights(round_number: int, mesh) -> dict[str, Any]:
  """Random float32 weights of one round, split over the trainer's mesh."""
  import jax
  from jax.sharding import NamedSharding, PartitionSpec

  made = {}
  for i, (name, shape) in enumerate(_shapes(_MEGABYTES.value).items()):
    spec: list[str | None] = [None] * len(shape)
    # The embed axis, MaxText's usual choice for fsdp.
    spec[shape.index(1024)] = "fsdp"
    key = jax.random.fold_in(jax.random.key(round_number), i)
    made[name] = jax.jit(
      jax.random.normal,
      static_argnums=1,
      out_shardings=NamedSharding(mesh, PartitionSpec(*spec)),
    )(key, shape)
  return jax.block_until_ready(made)


def _trainer(pipe) -> dict[str, Any]:
  """Measures both kinds of rounds."""
  import secrets

  import jax
  import numpy as np
  import psutil

  from laneweave.sync import convert, trainer
  from laneweave.sync import plan as plan_lib
  from laneweave.sync.transport import create

  mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("fsdp",))
  cfg = _config()
  weights = _weights(0, mesh)
  arrays = convert.convert(weights, cfg)
  plan = plan_lib.make_plan(weights, cfg)
  arrays = {name: arrays[name] for name in plan.outputs()}
  print(f"{len(arrays)} tensors, {plan.out_bytes / 1e6:.0f} MB", flush=True)
  raw = create.endpoint(
    "raiden",
    job="trainer",
    replica="raw",
    parallelism=_PARALLELISM.value,
    bind_ip="127.0.0.1",
  )
  controller = create.controller("raiden", parallelism=_PARALLELISM.value)
  raw.bind(arrays)
  other = pipe.recv()
  for unit in (raw.work_unit(), other):
    controller.register(unit)
  raiden_s = []
  for _ in range(_ROUNDS.value):
    start = time.perf_counter()
    raw.stage()
    controller.transfer(
      raw.work_unit(),
      [other],
      uuid=secrets.randbits(62) + 1,
      request=secrets.token_hex(8),
      timeout_s=120,
    )
    moved = time.perf_counter() - start
    pipe.send("load")
    raiden_s.append(moved + pipe.recv())
    print(f"raiden {raiden_s[-1]:.3f} s", flush=True)
  pipe.send("stop")
  raw.close()
  controller.close()
  del arrays

  sync = trainer.TrainerSync(cfg, parallelism=_PARALLELISM.value)
  pipe.send(sync.control_address)
  round_s, rss = [], []
  for version in range(_ROUNDS.value):
    weights = None
    weights = _weights(version + 1, mesh)
    start = time.perf_counter()
    sync.prepare(weights, version)
    outcome = sync.serve_round(120)
    round_s.append(time.perf_counter() - start)
    if outcome.outcome != "published":
      raise RuntimeError(f"{outcome}")
    rss.append((pipe.recv(), psutil.Process().memory_info().rss))
    phases = {**sync.timings, **outcome.replicas["0"].timings}
    print(
      f"round {round_s[-1]:.3f} s: "
      + ", ".join(f"{k} {v:.3f}" for k, v in sorted(phases.items())),
      flush=True,
    )
  sync.close()
  raiden = statistics.median(raiden_s[1:])
  full = statistics.median(round_s[1:])
  return {
    "megabytes": plan.out_bytes / 1e6,
    "tensors": len(plan.outputs()),
    "raiden_s": raiden,
    "round_s": full,
    "ratio": full / raiden,
    "streams": _PARALLELISM.value,
    "rss_megabytes_per_round": {
      "rollout": [round(r[0] / 1e6) for r in rss],
      "trainer": [round(r[1] / 1e6) for r in rss],
    },
  }


def main(argv: list[str]) -> None:
  """Runs both processes."""
  context = multiprocessing.get_context("spawn")
  ours, theirs = context.Pipe()
  del argv
  values = [
    f"--megabytes={_MEGABYTES.value}",
    f"--rounds={_ROUNDS.value}",
    f"--parallelism={_PARALLELISM.value}",
    f"--kernel_backend={_BACKEND.value}",
  ]
  process = context.Process(
    target=_rollout_process, args=(theirs, values), daemon=True
  )
  process.start()
  _set_up(4)
  try:
    result = _trainer(ours)
  finally:
    process.join(10)
    process.kill()
  print(json.dumps(result))


if __name__ == "__main__":
  app.run(main)
