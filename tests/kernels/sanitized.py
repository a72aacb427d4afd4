"""Whether this process runs under AddressSanitizer, as `make test-sanitize` starts it, and what its children need."""

import os
from pathlib import Path

MAPS = Path("/proc/self/maps")
SANITIZED = MAPS.exists() and "libasan" in MAPS.read_text()
FLAGS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"] if SANITIZED else []


def without_sanitizers():
    """The environment of a compiler: it does not run under what was loaded before this process."""
    return {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
