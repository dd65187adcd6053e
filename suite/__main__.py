"""``python -m suite`` is ``attnsuite``."""

from suite.command_line import main

main()
