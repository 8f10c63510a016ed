"""Rounds between a trainer and a rollout, over every transport."""

import contextlib
import dataclasses
import queue
import threading

import jax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from laneweave.sync import session
from laneweave.sync.config import SyncConfig
from laneweave.sync.control import client as client_lib
from laneweave.sync.control import control_pb2
from laneweave.sync.transport import base
from laneweave.tests.kernels import bits

CFG = SyncConfig(num_decoder_layers=3)
TRANSPORTS = ["local", "raiden", "raiden_ffi"]
WAIT_S = 30


def mesh(shape, names, first=0):
  count = int(np.prod(shape))
  devices = np.array(jax.devices()[first : first + count])
  return Mesh(devices.reshape(shape), names)


def params(version, seed=1):
  """A trainer's tree whose values depend on the version."""
  grid = mesh((4,), ("fsdp",))
  rng = np.random.default_rng(seed + version)
  shapes = {
    "layers.w.kernel": (16, 3, 24),
    "layers.norm.scale": (16, 3),
    "head.kernel": (8, 16),
  }
  return {
    name: jax.device_put(
      rng.standard_normal(dims, dtype=np.float32),
      NamedSharding(grid, P("fsdp")),
    )
    for name, dims in shapes.items()
  }


def target(first=4):
  """The rollout's arrays, on other devices than the trainer's."""
  grid = mesh((2, 2), ("fsdp", "tp"), first)

  def leaf(dims, spec):
    return jax.ShapeDtypeStruct(
      dims, jax.numpy.bfloat16, sharding=NamedSharding(grid, spec)
    )

  found = {"head.kernel": leaf((8, 16), P("tp", "fsdp"))}
  for i in range(3):
    found[f"layers_{i}.w.kernel"] = leaf((16, 24), P("fsdp", "tp"))
    found[f"layers_{i}.norm.scale"] = leaf((16,), P(("tp", "fsdp")))
  return found


@contextlib.contextmanager
def pair(transport, replicas=1, **options):
  """A trainer and its rollouts in this process."""
  cfg = CFG
  if transport == "raiden_ffi":
    transport = "raiden"
    cfg = dataclasses.replace(CFG, use_raiden_ffi=True)
  trainer = session.TrainerSync(
    cfg, transport=transport, replicas=replicas, parallelism=2
  )
  rollouts = [
    session.RolloutSync(
      target(),
      cfg=cfg,
      control_address=trainer.control_address,
      transport=transport,
      replica=str(i),
      parallelism=2,
      **options,
    )
    for i in range(replicas)
  ]
  try:
    yield trainer, rollouts
  finally:
    for rollout in rollouts:
      rollout.close()
    # Nobody is left to hear that the session ended.
    trainer._server.board._units.clear()
    trainer.close()


def serve(trainer):
  """Serves the round in a thread; gives a function that waits for it."""
  found = queue.Queue()
  thread = threading.Thread(
    target=lambda: found.put(trainer.serve_round(WAIT_S)), daemon=True
  )
  thread.start()
  return lambda: found.get(timeout=WAIT_S)


def check_serves(rollout, version):
  assert rollout.serving_version == version
  source = params(version)
  for i in range(3):
    want = np.asarray(source["layers.w.kernel"])[:, i].astype("bfloat16")
    bits.assert_bits_equal(rollout.serving[f"layers_{i}.w.kernel"], want)
  want = np.asarray(source["head.kernel"]).astype("bfloat16")
  bits.assert_bits_equal(rollout.serving["head.kernel"], want)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rounds(transport):
  """Versions arrive bit for bit; arrays once served never change."""
  with pair(transport) as (trainer, (rollout,)):
    with pytest.raises(session.RoundError, match="nothing to serve"):
      _ = rollout.serving  # F77: no version is not version 0
    assert rollout.serving_version is None
    held = []
    for version in (0, 1, 5):
      manifest = trainer.prepare(params(version), version)
      if version == 0:
        rollout.join(WAIT_S)
      outcome = serve(trainer)
      offered = rollout.next_round(WAIT_S)
      assert (offered.round_id, offered.version) == (
        manifest.round_id,
        version,
      )
      rollout.bind(offered)
      rollout.bind(offered)
      rollout.receive(WAIT_S)
      rollout.receive(WAIT_S)
      assert rollout.verify() == ()
      assert rollout.publish() == version
      assert rollout.publish() == version
      assert outcome().outcome == session.PUBLISHED
      check_serves(rollout, version)
      held.append((version, rollout.serving))
    for version, arrays in held:
      want = np.asarray(params(version)["head.kernel"]).astype("bfloat16")
      bits.assert_bits_equal(arrays["head.kernel"], want)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_F51_damage_is_never_published(transport):
  """One flipped bit in staging: named, aborted, the old version serves on."""
  with pair(transport) as (trainer, (rollout,)):
    trainer.prepare(params(0), 0)
    rollout.join(WAIT_S)
    outcome = serve(trainer)
    rollout.bind(rollout.next_round(WAIT_S))
    rollout.receive(WAIT_S)
    rollout.verify()
    rollout.publish()
    assert outcome().outcome == session.PUBLISHED

    trainer.prepare(params(1), 1)
    outcome = serve(trainer)
    rollout.bind(rollout.next_round(WAIT_S))
    rollout.receive(WAIT_S)
    name = "layers_1.w.kernel"
    damaged = np.asarray(rollout._arrived[name]).view(np.uint16).copy()
    damaged[3, 7] ^= 1 << 15
    rollout._arrived[name] = jax.device_put(
      damaged.view("bfloat16"), target()[name].sharding
    )
    assert rollout.verify() == (name,)
    with pytest.raises(session.RoundError, match=f"first `{name}`"):
      rollout.publish()
    rollout.abort("fingerprints differ")
    rollout.abort("again")
    ended = outcome()
    assert ended.outcome == session.ABORTED
    assert ended.replicas["0"].mismatched == (name,)
    check_serves(rollout, 0)

    # The next round works without a restart.
    trainer.prepare(params(2), 2)
    outcome = serve(trainer)
    rollout.bind(rollout.next_round(WAIT_S))
    rollout.receive(WAIT_S)
    assert rollout.verify() == ()
    rollout.publish()
    assert outcome().outcome == session.PUBLISHED
    check_serves(rollout, 2)


def test_two_rollouts_and_one_that_gives_up():
  with pair("local", replicas=2) as (trainer, rollouts):
    trainer.prepare(params(0), 0)
    for rollout in rollouts:
      rollout.join(WAIT_S)
    outcome = serve(trainer)
    manifests = [r.next_round(WAIT_S) for r in rollouts]
    for rollout, manifest in zip(rollouts, manifests, strict=True):
      rollout.bind(manifest)
    rollouts[1].abort("out of memory")
    rollouts[0].receive(WAIT_S)
    rollouts[0].verify()
    rollouts[0].publish()
    ended = outcome()
    assert ended.outcome == session.PARTIALLY_PUBLISHED
    assert ended.replicas["1"].reason == "out of memory"
    assert rollouts[1].serving_version is None


def test_F55_phases_out_of_order():
  with pair("local") as (trainer, (rollout,)):
    with pytest.raises(session.RoundError, match="nothing is staged"):
      trainer.serve_round(1)
    trainer.prepare(params(0), 0)
    rollout.join(WAIT_S)
    outcome = serve(trainer)
    manifest = rollout.next_round(WAIT_S)
    for phase in (rollout.verify, rollout.publish):
      with pytest.raises(session.RoundError, match="expected"):
        phase()
    with pytest.raises(session.RoundError, match="expected bound"):
      rollout.receive(1)
    rollout.bind(manifest)
    with pytest.raises(session.RoundError, match="is bound; expected received"):
      rollout.verify()
    rollout.receive(WAIT_S)
    with pytest.raises(session.RoundError, match="expected verified"):
      rollout.publish()
    rollout.verify()
    rollout.publish()
    outcome()
    with pytest.raises(session.RoundError, match="expected bound"):
      rollout.abort("too late")


def test_stale_rounds_and_versions_are_refused():
  with pair("local") as (trainer, (rollout,)):
    first = trainer.prepare(params(3), 3)
    assert trainer.prepare(params(3), 3) is first
    with pytest.raises(ValueError, match="`version` 2 is older than"):
      trainer.prepare(params(2), 2)
    rollout.join(WAIT_S)
    outcome = serve(trainer)
    rollout.bind(rollout.next_round(WAIT_S))
    rollout.receive(WAIT_S)
    rollout.verify()
    rollout.publish()
    outcome()
    trainer.prepare(params(4), 4)
    outcome = serve(trainer)
    rollout.bind(rollout.next_round(WAIT_S))
    with pytest.raises(session.RoundError, match="not newer than round 2"):
      rollout.bind(first)
    client = client_lib.ControlClient(trainer.control_address, "0")
    with pytest.raises(base.TransportError, match="not the current one"):
      client.receive(client.key(first), 5)
    with pytest.raises(base.TransportError, match="not the current one"):
      client.report(
        control_pb2.ReportRequest(
          key=client.key(first), outcome=session.PUBLISHED
        )
      )
    client.close()
    rollout.receive(WAIT_S)
    rollout.verify()
    rollout.publish()
    outcome()


def test_a_rollout_of_another_model_cannot_join():
  with pair("local") as (trainer, _):
    trainer.prepare(params(0), 0)
    other = target()
    other["layers_3.w.kernel"] = other.pop("layers_2.w.kernel")
    rollout = session.RolloutSync(
      other,
      cfg=CFG,
      control_address=trainer.control_address,
      transport="local",
      replica="other",
    )
    with pytest.raises(base.TransportError, match=r"`layers_2\.w\.kernel`"):
      rollout.join(WAIT_S)
    rollout.close()


def test_a_trainer_that_is_not_there():
  rollout = session.RolloutSync(
    target(),
    cfg=CFG,
    control_address="127.0.0.1:1",
    transport="local",
  )
  with pytest.raises(
    base.TransportError, match=r"no trainer .* 127\.0\.0\.1:1"
  ):
    rollout.join(1)
  rollout.close()


def test_a_trainer_that_ends():
  trainer = session.TrainerSync(CFG, transport="local")
  trainer.prepare(params(0), 0)
  rollout = session.RolloutSync(
    target(),
    cfg=CFG,
    control_address=trainer.control_address,
    transport="local",
  )
  rollout.join(WAIT_S)
  outcome = serve(trainer)
  rollout.bind(rollout.next_round(WAIT_S))
  rollout.receive(WAIT_S)
  rollout.verify()
  rollout.publish()
  outcome()
  closing = threading.Thread(target=trainer.close)
  closing.start()
  assert rollout.next_round(WAIT_S) is None
  closing.join(WAIT_S)
  check_serves(rollout, 0)
  with pytest.raises(base.TransportError, match="gone or cannot be reached"):
    rollout.next_round(5)
  rollout.close()


@pytest.mark.parametrize(
  "options",
  [{"verify": "checksum"}, {"parallelism": 0}, {"transport": "nccl"}],
)
def test_options_of_a_trainer_are_checked(options):
  with pytest.raises(ValueError, match=next(iter(options))):
    session.TrainerSync(CFG, **{"transport": "local", **options})


def test_a_target_without_shardings():
  with pytest.raises(ValueError, match="first `w`"):
    session.RolloutSync(
      {"w": np.zeros(3)}, cfg=CFG, control_address="", transport="local"
    )
