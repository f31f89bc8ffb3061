"""C code for CPUs, compiled on the machine that runs it: updates of rows of the bank, and recurrent layers."""
