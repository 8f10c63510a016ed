"""Which axes of a leaf its layers are stacked on.

From `create_scanned_layers` of MaxText 0.2.5. Layers are first stacked on axis
0; then the stacked axis of an `nnx.Param` moves to `param_scan_axis`, unless
the array has too few axes for that, in which case it stays where it is. Layers
scanned inside a scanned block go through this twice, inner ones first. With
`param_scan_axis=1`, `s` the inner and `S` the outer stacked axis:

    [embed, mlp]  ->  [embed, s, mlp]  ->  [embed, S, s, mlp]
    [embed]       ->  [embed, s]       ->  [embed, S, s]

and with `param_scan_axis=2`:

    [embed, mlp]  ->  [embed, mlp, s]  ->  [embed, mlp, S, s]
    [embed]       ->  [s, embed]       ->  [s, embed, S]

A variable that is no `nnx.Param`, such as the router's bias of DeepSeek 3
(`MoEBiasVar`), is not moved: it stays stacked on axis 0.
"""

from laneweave.sync.config import SyncConfig
from laneweave.sync.manifest import LeafSpec

# Variable types of MaxText's weights that are no `nnx.Param`.
_UNMOVED_KINDS = ("MoEBiasVar", "Tid2EidVar")
# The block of GPT-OSS, whose router's bias is an `nnx.Param`.
_PARAM_BIAS = ".GptOssMlp."


def stacked_positions(
  block_rank: int, count: int, param_scan_axis: int
) -> tuple[int, ...]:
  """Positions of the stacked axes of a parameter.

  Args:
    block_rank: Axes of one layer's array.
    count: Stacked axes, 0 to 2.
    param_scan_axis: MaxText's field.

  Returns:
    Positions in the stacked array, outermost stack first.
  """
  axes: tuple[int, ...] = ()
  for done in range(count):
    at = param_scan_axis if block_rank + done + 1 > param_scan_axis else 0
    axes = (at, *(a + (a >= at) for a in axes))
  return axes


def scan_axes(
  leaf: LeafSpec, stacked: tuple[int, ...], cfg: SyncConfig
) -> tuple[int, ...]:
  """The axes of a leaf on which its layers are stacked.

  Args:
    leaf: The leaf.
    stacked: Lengths that the stacked axes must have, outermost first.
    cfg: `param_scan_axis` is read; where it is None, the axes are found from
      the lengths.

  Returns:
    The axes, outermost first.

  Raises:
    ValueError: another length on these axes, or several axes that fit.
  """
  count = len(stacked)
  rank = len(leaf.shape) - count
  if not count:
    return ()
  if rank < 1:
    raise ValueError(
      "has no axis besides its stacked ones; a layer's scalar cannot be"
      " synced, store it with shape [1]"
    )
  if cfg.param_scan_axis is None:
    return _found(leaf, stacked)
  axes = stacked_positions(rank, count, cfg.param_scan_axis)
  unmoved = stacked_positions(rank, count, 0)
  if leaf.kind in _UNMOVED_KINDS or (
    _may_be_unmoved(leaf) and _lengths(leaf, unmoved) == stacked
  ):
    axes = unmoved
  for axis, length in zip(axes, stacked, strict=True):
    if leaf.shape[axis] != length:
      raise ValueError(
        f"has {leaf.shape[axis]} layers on axis {axis}, expected {length};"
        f" check `num_decoder_layers` ({cfg.num_decoder_layers}),"
        " `inhomogeneous_layer_cycle_interval`"
        f" ({cfg.inhomogeneous_layer_cycle_interval}) and `param_scan_axis`"
        f" ({cfg.param_scan_axis})"
      )
  return axes


def first_length(leaf: LeafSpec, count: int, cfg: SyncConfig) -> int:
  """Length of a leaf's outermost stacked axis, where nothing else tells it.

  Args:
    leaf: A leaf that is no router's bias.
    count: Its stacked axes.
    cfg: `param_scan_axis` is read.

  Returns:
    The length.

  Raises:
    ValueError: `param_scan_axis` is None, or the leaf has too few axes.
  """
  if cfg.param_scan_axis is None or len(leaf.shape) < count:
    raise ValueError(
      f"`{leaf.name}` {leaf} alone tells how many layers its stack holds; set"
      " `param_scan_axis`"
    )
  rank = len(leaf.shape) - count
  return leaf.shape[stacked_positions(rank, count, cfg.param_scan_axis)[0]]


def _found(leaf, stacked):
  """The only axes whose lengths fit."""
  last = len(leaf.shape) - len(stacked)
  fits = [
    a for a in range(last + 1) if leaf.shape[a : a + len(stacked)] == stacked
  ]
  if len(fits) != 1:
    raise ValueError(
      f"has {len(fits)} axes that can be the stacked one ({fits}) for"
      f" {stacked} layers; set `param_scan_axis`"
    )
  return tuple(range(fits[0], fits[0] + len(stacked)))


def _lengths(leaf, axes):
  return tuple(leaf.shape[a] for a in axes)


def _may_be_unmoved(leaf):
  """A router's bias of unknown type; by its place it is DeepSeek's."""
  return (
    leaf.kind is None
    and leaf.name.endswith(".gate.bias")
    and _PARAM_BIAS not in leaf.name
  )
