"""``python -m roundpipe COMMAND``."""

from __future__ import annotations

import sys

from roundpipe.commands.parser import main

if __name__ == "__main__":
    sys.exit(main())
