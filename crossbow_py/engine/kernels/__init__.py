"""GPU kernels in Triton: functions of tensors, one launch each unless they say otherwise.

They know tensors and nothing of banks, rounds or feeds. Without Triton only `checks` and `geometry` can be imported;
import the others after `core.triton_launch.unavailable` has returned None.
"""
