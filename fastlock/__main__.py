"""`python -m fastlock` is the `fastlock` command; what it does is in `_cli`."""

from __future__ import annotations

import sys

from fastlock._cli.main import main

if __name__ == "__main__":
    sys.exit(main())
