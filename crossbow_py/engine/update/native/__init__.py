"""C code for what one CPU core does to a row of the bank, compiled on the machine that runs it."""
