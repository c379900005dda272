"""The room for all private access to Megatron.

What begins with an underscore in Megatron, or is known from reading its code and not from its
interface, is looked up here and nowhere else, so that another release is a matter of this folder
and of the tables of replaced attributes:

- :mod:`.releases`: the releases that are supported;
- :mod:`.replaced`: rows of the tables of replaced attributes;
- :mod:`.data_parallel`, :mod:`.optimizers`, :mod:`.pipeline`, :mod:`.training`, :mod:`.saves`,
  :mod:`.moe`: Megatron's areas.
"""
