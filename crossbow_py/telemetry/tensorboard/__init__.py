"""TensorBoard: the files of a run, the layout of its charts, and the hyper-parameters of runs and trials."""
