"""Flags of `laneweave-sync`, each declared once, and their checked values."""

import collections.abc
import dataclasses
import ipaddress
import pathlib

from absl import flags

from laneweave.sync import meshes, sharding_rules
from laneweave.sync.control import keys

SIDES = sharding_rules.SIDES
ROLES = ("both", *SIDES)
TRANSPORTS = ("auto", "raiden", "local")
FFI = ("auto", "true", "false", *SIDES)
KERNEL_BACKENDS = ("auto", "mosaic", "interpret", "xla")
ROLLOUT_BACKENDS = ("maxtext", "vllm_torchax")
VERIFY = ("fingerprint", "reference", "off")

BUNDLED = pathlib.Path(__file__).parent / "data" / "qwen3-moe-tiny.trainer.npz"
# Where the trainer listens, and the rollout looks for it, when the two are
# started by hand and no address is given.
DEFAULT_PORT = 47470
# Read the address from standard input: what the launcher gives its rollout.
ADDRESS_FROM_STDIN = "-"

_LARGEST_PORT = 65535
_MOST_STREAMS = 256
_FASTEST_GBPS = 1e6

_CHECKPOINT = flags.DEFINE_string(
  "checkpoint",
  None,
  "Trainer's weights: a .npz file, a .safetensors file or directory, or an"
  " Orbax directory, by dotted MaxText names. Default: the small Qwen3-MoE"
  " checkpoint that comes with laneweave.",
)
_MAXTEXT_CONFIG = flags.DEFINE_string(
  "maxtext_config",
  None,
  "JSON or YAML file of MaxText's field names that describes the trainer."
  " Default: X.config.json beside a checkpoint X.trainer.npz, X.npz,"
  " X.safetensors or X/.",
)
_TRAINER_MESH = flags.DEFINE_string(
  "trainer_mesh",
  "fsdp=4",
  "Mesh of the trainer as axis=size,..., sizes in devices. Without an"
  " accelerator the devices are virtual CPU devices.",
)
_ROLLOUT_MESH = flags.DEFINE_string(
  "rollout_mesh",
  "fsdp=2,tp=2",
  "Mesh of the rollout as axis=size,..., sizes in devices.",
)
_SHARDING_RULES = flags.DEFINE_string(
  "sharding_rules",
  "",
  "Changes to how logical axes are sharded over mesh axes, as"
  " [trainer:|rollout:]logical=mesh[+mesh],...;... Example:"
  " trainer:embed=fsdp;rollout:mlp=tp,vocab= (nothing after = : not"
  " sharded). Logical axes are MaxText's; embed and mlp stand for their"
  " families (embed_moe, mlp_moe, ...); * takes mesh axes that no other rule"
  " used. Defaults, both sides: embed=fsdp, mlp/heads/q_heads/kv_heads/"
  "vocab=tp (or tensor, model), exp=ep (or expert); trainer also *=fsdp. A"
  " mesh axis that does not divide an array's axis is left out there.",
)
_MOE_LANE_SIZE = flags.DEFINE_integer(
  "moe_lane_size",
  None,
  "How gate and up are joined, in lanes: 0, gate then up in each shard, or"
  " 128, alternating in chunks of 128 lanes. Default: the configuration's"
  " value, else 0.",
)
_WEIGHT_DTYPE = flags.DEFINE_string(
  "weight_dtype", "bfloat16", "dtype of the rollout's weights."
)
_ROLLOUT_BACKEND = flags.DEFINE_enum(
  "rollout_backend",
  "maxtext",
  ROLLOUT_BACKENDS,
  "Whose names and layouts the rollout has.",
)
_TRANSPORT = flags.DEFINE_enum(
  "transport",
  "auto",
  TRANSPORTS,
  "How weights travel. raiden: over the network, between two processes."
  " local: one process, jax.device_put across the two meshes, for machines"
  " where Raiden cannot be installed. auto: raiden, an error without it.",
)
_USE_RAIDEN_FFI = flags.DEFINE_enum(
  "use_raiden_ffi",
  "auto",
  FFI,
  "Stage through Raiden's FFI rather than its native synchronizer. auto: the"
  " runtime decides, FFI under Pathways and native elsewhere, unless"
  " RAIDEN_USE_FFI says otherwise. trainer and rollout: FFI on that side and"
  " native on the other.",
)
_SIMULATED_GBPS = flags.DEFINE_float(
  "simulated_gbps",
  0.0,
  "Rate of a simulated link in Gbit/s, each way, between CPU devices with"
  " --use_raiden_ffi=true. 0: as fast as it goes.",
)
_KERNEL_BACKEND = flags.DEFINE_enum(
  "kernel_backend",
  "auto",
  KERNEL_BACKENDS,
  "What runs the kernels. mosaic: Pallas on TPU. interpret: the same Pallas"
  " kernels on CPU, slow. xla: plain XLA code. auto: mosaic on TPU, xla"
  " elsewhere.",
)
_ROUNDS = flags.DEFINE_integer(
  "rounds",
  3,
  "Number of rounds. Round 1 moves the checkpoint as it is; in each later"
  " one the weights have changed.",
)
_VERIFY = flags.DEFINE_enum(
  "verify",
  "reference",
  VERIFY,
  "fingerprint: the rollout checks the fingerprint of every tensor in every"
  " round before it publishes. reference: the same, and the last round is"
  " also compared bit for bit with a conversion in NumPy. off: nothing is"
  " checked, and the report says so.",
)
_ROLE = flags.DEFINE_enum(
  "role",
  "both",
  ROLES,
  "both: starts a trainer and a rollout process and waits for them. trainer"
  " and rollout: one of the two, to be started in two shells or on two hosts"
  " with otherwise equal flags.",
)
_CONTROLLER_ADDRESS = flags.DEFINE_string(
  "controller_address",
  None,
  "host:port of the trainer's control service: where the rollout finds it,"
  " and the port the trainer listens on (0: any free port, printed)."
  f" Default: 127.0.0.1:{DEFAULT_PORT} for the roles trainer and rollout, a"
  " free port for both.",
)
_BIND_IP = flags.DEFINE_string(
  "bind_ip",
  "127.0.0.1",
  "IP address that the control service and Raiden are told to listen on."
  " Raiden's data ports listen on every interface all the same.",
)
_AUTH_KEY_FILE = flags.DEFINE_string(
  "auth_key_file",
  None,
  "File whose bytes, 16 to 4096, are the key that both sides share. Control"
  " messages and manifests are signed with it (HMAC-SHA256). Needed unless all"
  " addresses are on loopback.",
)
_PARALLELISM = flags.DEFINE_integer(
  "parallelism",
  8,
  "Number of network streams of Raiden; reported as `streams`. Loopback"
  " needs few, a data-center link 8 to 16.",
)
_REPORT = flags.DEFINE_string(
  "report", None, "JSON file for the full report. Default: none is written."
)
_WEIGHT_SYNC_DEBUG = flags.DEFINE_boolean(
  "weight_sync_debug",
  False,
  "Wait for each source parameter after its conversion, and name the one"
  " that failed. Slow.",
)
_TIMEOUT_S = flags.DEFINE_float(
  "timeout_s",
  300.0,
  "Seconds that a side waits for the other before the round fails.",
)
_EVENT_FD = flags.DEFINE_integer(
  "event_fd",
  -1,
  "File descriptor for progress events, set by --role=both for the processes"
  " it starts. -1: none.",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
  """The flags' values, checked; fields are named like the flags."""

  checkpoint: pathlib.Path
  maxtext_config: pathlib.Path | None
  trainer_mesh: meshes.MeshSpec
  rollout_mesh: meshes.MeshSpec
  rules: dict[str, sharding_rules.Rules]  # From --sharding_rules, by side.
  moe_lane_size: int | None
  weight_dtype: str
  rollout_backend: str
  transport: str
  use_raiden_ffi: str
  simulated_gbps: float
  kernel_backend: str
  rounds: int
  verify: str
  role: str
  controller_address: str | None
  bind_ip: str
  auth_key_file: pathlib.Path | None
  parallelism: int
  report: pathlib.Path | None
  weight_sync_debug: bool
  timeout_s: float
  event_fd: int

  def auth_key(self) -> bytes | None:
    """Reads the key; never kept here, since options are reported."""
    if self.auth_key_file is None:
      return None
    return keys.read(self.auth_key_file)

  def ffi(self, side: str) -> bool | None:
    """Whether a side stages through FFI; None: the runtime decides."""
    if self.use_raiden_ffi == "auto":
      return None
    return self.use_raiden_ffi in ("true", side)

  def mesh(self, side: str) -> meshes.MeshSpec:
    """The mesh of a side."""
    return {"trainer": self.trainer_mesh, "rollout": self.rollout_mesh}[side]


def read(arguments: collections.abc.Sequence[str]) -> Options:
  """Checks the parsed flags.

  Args:
    arguments: What is left of the command line, program name included.

  Returns:
    The options.

  Raises:
    ValueError: values that are out of range or contradict each other.
  """
  if len(arguments) > 1:
    raise ValueError(
      f"unexpected argument {arguments[1]!r}; every setting is a flag, see"
      " --help"
    )
  _in_range("rounds", _ROUNDS.value, 1, 1 << 30)
  _in_range("parallelism", _PARALLELISM.value, 1, _MOST_STREAMS)
  _in_range("timeout_s", _TIMEOUT_S.value, 1, 86400)
  if _MOE_LANE_SIZE.value not in (None, 0, 128):
    raise ValueError(f"`--moe_lane_size` {_MOE_LANE_SIZE.value}: 0 or 128")
  if _ROLE.value != "both" and _TRANSPORT.value == "local":
    raise ValueError(
      f"`--transport=local` is one process and `--role={_ROLE.value}` one of"
      " two; use --role=both"
    )
  _in_range("simulated_gbps", _SIMULATED_GBPS.value, 0, _FASTEST_GBPS)
  ffi = _USE_RAIDEN_FFI.value
  if _TRANSPORT.value == "local" and ffi not in ("auto", "false"):
    raise ValueError(
      f"`--use_raiden_ffi={ffi}` is one of Raiden's ways and"
      " `--transport=local` does without Raiden; leave one of them out"
    )
  if _SIMULATED_GBPS.value and ffi != "true":
    raise ValueError(
      f"`--simulated_gbps` {_SIMULATED_GBPS.value:g} is the rate of FFI on CPU"
      " devices; give --use_raiden_ffi=true too"
    )
  try:
    ipaddress.ip_address(_BIND_IP.value)
  except ValueError:
    raise ValueError(
      f"`--bind_ip` {_BIND_IP.value!r} is not an IP address"
    ) from None
  for flag in (_CHECKPOINT, _MAXTEXT_CONFIG, _REPORT, _AUTH_KEY_FILE):
    if flag.value == "" or "\0" in (flag.value or ""):
      raise ValueError(f"`--{flag.name}` {flag.value!r} is not a path")
  trainer_mesh = meshes.parse(_TRAINER_MESH.value, "trainer_mesh")
  rollout_mesh = meshes.parse(_ROLLOUT_MESH.value, "rollout_mesh")
  address = _address(_CONTROLLER_ADDRESS.value, _ROLE.value)
  options = Options(
    checkpoint=_path(_CHECKPOINT.value) or BUNDLED,
    maxtext_config=_path(_MAXTEXT_CONFIG.value),
    trainer_mesh=trainer_mesh,
    rollout_mesh=rollout_mesh,
    rules=sharding_rules.parse(
      _SHARDING_RULES.value,
      {"trainer": trainer_mesh, "rollout": rollout_mesh},
    ),
    moe_lane_size=_MOE_LANE_SIZE.value,
    weight_dtype=_WEIGHT_DTYPE.value,
    rollout_backend=_ROLLOUT_BACKEND.value,
    transport=_TRANSPORT.value,
    use_raiden_ffi=_USE_RAIDEN_FFI.value,
    simulated_gbps=_SIMULATED_GBPS.value,
    kernel_backend=_KERNEL_BACKEND.value,
    rounds=_ROUNDS.value,
    verify=_VERIFY.value,
    role=_ROLE.value,
    controller_address=address,
    bind_ip=_BIND_IP.value,
    auth_key_file=_path(_AUTH_KEY_FILE.value),
    parallelism=_PARALLELISM.value,
    report=_path(_REPORT.value),
    weight_sync_debug=_WEIGHT_SYNC_DEBUG.value,
    timeout_s=_TIMEOUT_S.value,
    event_fd=_EVENT_FD.value,
  )
  keys.require(options.auth_key(), _hosts(options))
  return options


def _hosts(options: Options) -> dict[str, str]:
  """Addresses that other machines might reach, by flag."""
  hosts = {"--bind_ip": options.bind_ip}
  if options.controller_address not in (None, ADDRESS_FROM_STDIN):
    hosts["--controller_address"] = keys.host_of(options.controller_address)
  return hosts


def _path(text: str | None) -> pathlib.Path | None:
  return None if text is None else pathlib.Path(text)


def _in_range(name: str, value: float, least: float, most: float) -> None:
  if not least <= value <= most:
    raise ValueError(f"`--{name}` {value} is not between {least} and {most}")


def _address(text: str | None, role: str) -> str | None:
  """Where the control service is; None: on any free port."""
  if text is None:
    return None if role == "both" else f"127.0.0.1:{DEFAULT_PORT}"
  if text == ADDRESS_FROM_STDIN:
    return text
  host, colon, port = text.rpartition(":")
  good = port.isdecimal() and len(port) <= 5 and int(port) <= _LARGEST_PORT
  if not colon or not host or not good:
    raise ValueError(
      f"`--controller_address` {text!r} is not host:port, such as"
      f" 127.0.0.1:{DEFAULT_PORT}"
    )
  if role == "rollout" and int(port) == 0:
    raise ValueError(
      f"`--controller_address` {text!r}: the rollout needs the port that the"
      " trainer printed"
    )
  return text


def describe() -> str:
  """Help on every flag of this module."""
  lines = []
  module_flags = flags.FLAGS.flags_by_module_dict()[__name__]
  for flag in sorted(module_flags, key=lambda f: f.name):
    default = "" if flag.default is None else f" (default: {flag.default})"
    lines.append(
      flags.text_wrap(
        f"--{flag.name}: {flag.help}{default}", 78, "      ", "  "
      )
    )
  return "\n".join(lines)
