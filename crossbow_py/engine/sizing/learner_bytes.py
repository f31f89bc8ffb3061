"""What a learner needs on its device, by what it is for, and so what K learners need."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LearnerBytes:
    """What one learner needs on its device, in bytes.

    Attributes:
        weights, gradients, corrections: P master values each.
        state: the optimizer's P master values, as often as it has state rows.
        shadow: P values in the compute format, where that is another.
        buffers: floating-point buffers.
        activations: the most that a forward and a backward pass over a batch hold beside all of this: the batch,
            activations, the gradients as autograd makes them, and workspaces inside operators. Probed, not computed.
    """

    weights: int
    gradients: int
    corrections: int
    state: int
    shadow: int
    buffers: int
    activations: int

    @property
    def row(self) -> int:
        """What stays from round to round."""
        return self.weights + self.gradients + self.corrections + self.state + self.shadow + self.buffers

    @property
    def whole(self) -> int:
        """All of it."""
        return self.row + self.activations


def learner_bytes(
    num_values: int,
    num_buffer_values: int,
    num_states: int,
    *,
    master_bytes: int,
    compute_bytes: int,
    activations: int,
) -> LearnerBytes:
    """What a learner of a model with P = `num_values` needs; padding to 128 bytes a block is not counted.

    `master_bytes` and `compute_bytes` are those of a value, in rows and in a pass.
    """
    values = num_values * master_bytes
    return LearnerBytes(
        weights=values,
        gradients=values,
        corrections=values,
        state=num_states * values,
        shadow=num_values * compute_bytes if compute_bytes != master_bytes else 0,
        buffers=num_buffer_values * master_bytes,
        activations=activations,
    )


def predicted_bytes(own: LearnerBytes, num_learners: int, *, at_once: int, fixed: int = 0) -> int:
    """Peak of K learners on a device, of which `at_once` run at the same moment::

        fixed + (z, z_prev and the sum of corrections: 3 P values) + K · row + at_once · activations

    `fused`, `threads` and `streams` have all K at once; `serial` has one, as learners in turn use the same memory.
    `fixed` is what else is there: the data set, the template, the context of the device.
    """
    assert 1 <= at_once <= num_learners, f"{at_once} of {num_learners} learners cannot run at once"
    return fixed + 3 * own.weights + num_learners * own.row + at_once * own.activations
