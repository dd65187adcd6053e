"""What to measure and how: cases, the runner and its isolated workers, records, the command line."""
