"""``python -m attnsuite.suite`` is ``attnsuite``."""

from .entry import main

main()
