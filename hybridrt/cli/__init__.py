"""The command line: `hybridrt generate`, `chat`, `serve`, `router`, `inspect`, `explain`,
`quantize`, `compile`, `tune`, `verify`, `compare`, `doctor`, `bench`.

Importing it does not import torch.
"""

import atexit
import signal
import sys


def main() -> None:
    """Runs the command in sys.argv and exits: 0 after success, 1 after a failure while running, 2
    for a request that cannot be met, 130 after an interrupt.
    """
    try:
        from hybridrt.cli.app import run
    except KeyboardInterrupt:  # `run` reports those that come later
        sys.exit(130)
    try:
        run()
    finally:
        # A late interrupt would print a traceback and change nothing.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)
