"""``python -m weft_cli`` is ``weft``."""

from weft_cli.main import main

main()
