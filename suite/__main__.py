"""``python -m suite`` is ``attnsuite``."""

from suite.entry import main

main()
