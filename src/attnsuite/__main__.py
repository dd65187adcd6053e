"""``python -m attnsuite`` runs the command ``attnsuite``."""

from .suite.entry import main

if __name__ == "__main__":
    main()
