"""What changes a learner's row: optimizers, corrections and the outer step, by torch operators, C code or kernels."""
