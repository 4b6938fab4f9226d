"""`python -m shoal_toolkit` is `train`."""

import sys

from shoal_toolkit.cli import main

sys.exit(main())
