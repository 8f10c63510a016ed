"""Makes the ends of a transport by name."""

import os

from laneweave.sync.transport import base, local, resolve

NAMES = ("auto", "raiden", "local")
VERIFY = ("fingerprint", "off")


def check_options(
  *, verify: str, parallelism: int, bind_ip: str, replicas: int = 1
) -> None:
  """Checks what both sessions are given.

  Args:
    verify: One of `VERIFY`.
    parallelism: Raiden's network streams.
    bind_ip: Address to listen on and to be reached by.
    replicas: Rollouts of a round.

  Raises:
    ValueError: with everything that is wrong.
  """
  problems = []
  if verify not in VERIFY:
    problems.append(f"`verify` {verify!r} is not one of {', '.join(VERIFY)}")
  if parallelism < 1:
    problems.append(f"`parallelism` {parallelism} must be at least 1")
  if replicas < 1:
    problems.append(f"`replicas` {replicas} must be at least 1")
  if bind_ip in ("", "0.0.0.0", "::"):  # noqa: S104
    problems.append(
      f"`bind_ip` {bind_ip!r} is no address that the other side could reach;"
      " give one of this host's own"
    )
  if problems:
    raise ValueError("; ".join(problems))


def resolve_name(name: str, use_raiden_ffi: bool | None) -> str:
  """The transport that a session uses.

  Args:
    name: One of `NAMES`.
    use_raiden_ffi: See `resolve.resolve_transport`.

  Returns:
    "raiden" or "local".

  Raises:
    ValueError: no such transport.
    RuntimeError: the transport cannot be had here; see `resolve`.
  """
  if name not in NAMES:
    raise ValueError(f"`transport` {name!r} is not one of {', '.join(NAMES)}")
  if name == "local":
    return name
  choice = resolve.choose(
    use_raiden_ffi,
    platforms=os.environ.get("JAX_PLATFORMS"),
    environment=os.environ.get("RAIDEN_USE_FFI"),
  )
  if choice.name == "raiden_ffi":
    raise RuntimeError(
      "`use_raiden_ffi` asks for Raiden's FFI, which this version does not"
      " drive; unset it to use the native synchronizer"
    )
  if choice.host_staging:
    raise RuntimeError(
      "proxy arrays (Pathways) would have to be staged on the client's host,"
      " which this version does not do; use --transport=local in one process"
    )
  return choice.name


def endpoint(
  name: str, *, job: str, replica: str, parallelism: int, bind_ip: str
) -> base.Endpoint:
  """Makes one side's end.

  Args:
    name: A resolved transport.
    job: "trainer" or "rollout".
    replica: Replica of the job.
    parallelism: Raiden's network streams.
    bind_ip: Address that the other side reaches this one by.

  Returns:
    The endpoint.
  """
  if name == "local":
    return local.LocalEndpoint(job=job, replica=replica)
  # Raiden's modules are imported only where they are used, and before any
  # device is touched by this process's TPU backend.
  from laneweave.sync.transport import raiden_native

  return raiden_native.NativeEndpoint(
    job=job, replica=replica, parallelism=parallelism, bind_ip=bind_ip
  )


def controller(name: str, *, parallelism: int) -> base.Controller:
  """Makes the trainer's controller.

  Args:
    name: A resolved transport.
    parallelism: Raiden's network streams.

  Returns:
    The controller.
  """
  if name == "local":
    return local.LocalController()
  from laneweave.sync.transport import raiden_native

  return raiden_native.NativeController(parallelism=parallelism)
