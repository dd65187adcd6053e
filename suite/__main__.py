"""``python -m attnsuite.suite`` runs the command ``attnsuite``."""

from .entry import main

main()
