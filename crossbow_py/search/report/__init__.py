"""What the user of a search sees of it: on the terminal, in search.json, in TensorBoard, in pictures."""
