"""Makes the ends of a transport by name."""

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
    "raiden", "raiden_ffi" or "local".

  Raises:
    ValueError: no such transport, or FFI asked of one that has none.
    RuntimeError: the transport cannot be had here; see `resolve`.
  """
  if name not in NAMES:
    raise ValueError(f"`transport` {name!r} is not one of {', '.join(NAMES)}")
  if name == "local":
    if use_raiden_ffi:
      raise ValueError(
        "`use_raiden_ffi` asks for Raiden's FFI, and `transport` 'local' does"
        " without Raiden; set one of them otherwise"
      )
    return name
  choice = resolve.choose(use_raiden_ffi)
  if choice.host_staging:
    raise RuntimeError(
      "proxy arrays (Pathways) would have to be staged on the client's host,"
      " which this version does not do; use --transport=local in one process"
    )
  return choice.name


def endpoint(
  name: str,
  *,
  job: str,
  replica: str,
  parallelism: int,
  bind_ip: str,
  simulated_gbps: float = 0.0,
) -> base.Endpoint:
  """Makes one side's end.

  Args:
    name: A resolved transport.
    job: "trainer" or "rollout".
    replica: Replica of the job.
    parallelism: Raiden's network streams.
    bind_ip: Address that the other side reaches this one by.
    simulated_gbps: Rate of a simulated link in Gbit/s, which "raiden_ffi" has
      on CPU devices; 0: none.

  Returns:
    The endpoint.

  Raises:
    ValueError: a simulated link for another transport.
  """
  if simulated_gbps and name != "raiden_ffi":
    raise ValueError(
      f"`simulated_gbps` {simulated_gbps:g} needs Raiden's FFI on CPU devices,"
      f" and the transport is {name}; set `use_raiden_ffi` to True"
    )
  if name == "local":
    return local.LocalEndpoint(job=job, replica=replica)
  # Raiden's modules are imported only where they are used, and before any
  # device is touched by this process's TPU backend.
  if name == "raiden_ffi":
    from laneweave.sync.transport import raiden_ffi

    return raiden_ffi.FfiEndpoint(
      job=job,
      replica=replica,
      parallelism=parallelism,
      bind_ip=bind_ip,
      simulated_gbps=simulated_gbps,
    )
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
