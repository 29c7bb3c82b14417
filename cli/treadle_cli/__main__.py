"""``python -m treadle_cli`` is ``treadle``."""

from treadle_cli.main import main

main()
