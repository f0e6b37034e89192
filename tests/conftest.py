"""One thread per process: the tests start many, and torch would give each one every core."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
