"""C code that updates rows of the bank on CPUs, compiled on the machine that runs it."""
