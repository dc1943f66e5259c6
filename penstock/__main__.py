"""`python -m penstock` is the command line."""

import os
import sys

if __name__ == "__main__" and not sys.flags.safe_path and os.path.realpath(sys.path[0]) == os.path.realpath("."):
    del sys.path[0]  # the current folder, where a torch.py would be taken for torch

from penstock.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
