"""`python -m tests.chaos`; `run.py` has it all."""

import sys

from tests.chaos.run import main

sys.exit(main())
