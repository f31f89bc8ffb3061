"""GPU kernels in Triton: functions of tensors, one launch each unless they say otherwise.

The lowest room: it knows tensors and nothing of banks, rounds or feeds. Where Triton may be missing only `launch` and
`geometry` may be imported; the other modules need it, and are imported after `launch.unavailable` has said None.
"""
