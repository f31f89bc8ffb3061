"""Updates of learners' rows: optimizers, corrections and the outer step, by torch operators, C code or kernels."""
