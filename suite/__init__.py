"""The cases to measure, the runs that measure them, their records, and the command line."""
