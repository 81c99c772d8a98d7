"""`python -m cdeq`, and `torchrun -m cdeq`."""

import sys

from cdeq.cli import main

if __name__ == "__main__":
    sys.exit(main())
