"""A grid of cells: listing them, running them in processes, keeping their records and showing progress."""
