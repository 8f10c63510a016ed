"""A session in a process of its own, told what to do by the test.

The test calls methods of a `TrainerSync` or `RolloutSync` by name; what they
return or raise comes back over a pipe. The process can be killed or stopped at
any point.
"""

import contextlib
import multiprocessing
import os
import signal

CFG = {"num_decoder_layers": 3}
LAYERS = 3
WAIT_S = 60


class PeerError(RuntimeError):
  """What a call raised in the other process."""


class Peer:
  """One process with one session."""

  def __init__(self, role, *, devices=8, **options):
    # Forked from a process that has imported JAX and has not started it.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
      ["laneweave.sync.session", "laneweave.tests.sync.small_model"]
    )
    self._pipe, theirs = context.Pipe()
    self._process = context.Process(
      target=_main, args=(theirs, role, devices, options), daemon=True
    )
    self._process.start()
    theirs.close()

  def start(self, method, *args):
    """Calls a method and does not wait for it."""
    self._pipe.send((method, args))

  def result(self, timeout_s=WAIT_S):
    """What the oldest call returned; raises what it raised."""
    if not self._pipe.poll(timeout_s):
      raise TimeoutError(f"no answer within {timeout_s} s")
    kind, value = self._pipe.recv()
    if kind == "error":
      raise PeerError(value)
    return value

  def call(self, method, *args, timeout_s=WAIT_S):
    """Calls a method and waits for it."""
    self.start(method, *args)
    return self.result(timeout_s)

  def kill(self, how=signal.SIGKILL):
    """Sends a signal."""
    os.kill(self._process.pid, how)

  def gone(self, timeout_s):
    """Whether the process ends within a time."""
    self._process.join(timeout_s)
    return not self._process.is_alive()

  def close(self):
    """Ends the process however it is."""
    self._process.kill()
    self._process.join(10)
    self._pipe.close()


@contextlib.contextmanager
def peers():
  """Gives a function that starts peers, all of which are ended with it."""
  started = []

  def start(*args, **options):
    started.append(Peer(*args, **options))
    return started[-1]

  try:
    yield start
  finally:
    for peer in started:
      peer.close()


def _main(pipe, role, devices, options):
  """The other process."""
  os.environ["JAX_PLATFORMS"] = "cpu"
  os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
  actor = None
  while True:
    try:
      method, args = pipe.recv()
    except EOFError:
      return
    if method == "exit":
      return
    try:
      if actor is None:
        actor = {"trainer": _Trainer, "rollout": _Rollout}[role](options)
      pipe.send(("ok", getattr(actor, method)(*args)))
    except Exception as error:  # noqa: BLE001
      pipe.send(("error", f"{type(error).__name__}: {error}"))


class _Actor:
  """What both roles can be asked."""

  def ready(self):
    """Answers once the session exists."""

  def resources(self):
    """Threads and open files of this process."""
    import threading

    return threading.active_count(), len(os.listdir("/proc/self/fd"))

  def get(self, name):
    """An attribute of the session."""
    return getattr(self.sync, name)


class _Trainer(_Actor):
  """A trainer of the small model below."""

  def __init__(self, options):
    from laneweave.sync import session
    from laneweave.sync.config import SyncConfig

    self.sync = session.TrainerSync(SyncConfig(**CFG), **options)

  def prepare(self, version):
    from laneweave.tests.sync import small_model

    m = self.sync.prepare(small_model.params(version), version)
    return m.round_id, m.version

  def serve(self, timeout_s):
    outcome = self.sync.serve_round(timeout_s)
    return outcome.outcome, {
      replica: (r.outcome, r.reason) for replica, r in outcome.replicas.items()
    }

  def close(self):
    self.sync.close()


class _Rollout(_Actor):
  """A rollout of the small model below."""

  def __init__(self, options):
    from laneweave.sync import session
    from laneweave.sync.config import SyncConfig
    from laneweave.tests.sync import small_model

    self.sync = session.RolloutSync(
      small_model.target(), cfg=SyncConfig(**CFG), **options
    )

  def join(self, timeout_s=WAIT_S):
    self.sync.join(timeout_s)

  def bind_next(self, timeout_s=WAIT_S):
    self.sync.bind(self.sync.next_round(timeout_s))

  def receive(self, timeout_s=WAIT_S):
    self.sync.receive(timeout_s)

  def verify(self):
    return self.sync.verify()

  def publish(self):
    return self.sync.publish()

  def abort(self, reason):
    self.sync.abort(reason)

  def whole_round(self, timeout_s=WAIT_S):
    self.bind_next(timeout_s)
    self.receive(timeout_s)
    assert self.verify() == ()
    return self.publish()

  def check_serves(self, version):
    """Whether the arrays served are a version's, bit for bit."""
    from laneweave.tests.sync import small_model

    small_model.check_serves(self.sync, version)

  def close(self):
    self.sync.close()
