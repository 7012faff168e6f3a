"""Prefill workers in processes of their own: python -m tests.support.transfer_process MODEL OPTIONS

For every line on standard input a worker is forked off, and its process id and port are printed. A line is the kind of
event after which the worker shall die ("job", "ready" or "never") and how many seconds later. "here" forks nothing: the
worker is this process, which ends as soon as it can read no more.
"""

import json
import os
import select
import signal
import sys
import time
from contextlib import suppress

import torch

from hybridrt import LLM
from hybridrt.transfer.workers import prefill_worker


def work(llm: LLM, event: str, seconds: float) -> None:
    worker = prefill_worker(llm)
    print(os.getpid(), worker.port, flush=True)
    while event != "here" or not select.select([sys.stdin], [], [], 0)[0]:
        if not worker.step():
            time.sleep(0.0002)
        counters = worker.counters()
        if (event == "job" and counters.jobs) or (event == "ready" and counters.computed):
            event = "done"
            signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))  # its signal has no handler
    worker.close()
    llm.close()


def main() -> None:
    torch.set_num_threads(1)  # threads of OpenMP do not survive a fork
    llm = LLM(sys.argv[1], **json.loads(sys.argv[2]))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    children = []
    for line in sys.stdin:
        event, seconds = line.split()
        if event == "here":
            return work(llm, event, 0.0)
        children.append(os.fork())
        if not children[-1]:
            work(llm, event, float(seconds))
    for child in children:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


if __name__ == "__main__":
    main()
