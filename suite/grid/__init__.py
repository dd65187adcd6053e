"""A grid of cells: which there are, who runs them, in which process, and who is told."""
