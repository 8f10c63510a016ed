"""Stand-ins for the wrappers of flax, which the tests do without."""


class Variable:
  """The part of flax.nnx's Variable that is used here."""

  def __init__(self, value):
    self._value = value

  def get_value(self):
    return self._value


class Param(Variable):
  pass


class RngKey(type("RngState", (Variable,), {})):
  pass


class Cache(Variable):
  pass


class MoEBiasVar(Variable):
  pass


class Box:
  """As Linen's LogicallyPartitioned."""

  def __init__(self, value):
    self._value = value

  def unbox(self):
    return self._value
