"""What is measured, and how: speed, memory, the machine, the environment, and the judge of numbers."""
