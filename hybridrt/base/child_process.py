"""Starts another interpreter that runs a module of this package.

multiprocessing would run the caller's main module once more.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# The child imports this package from the same files, others from its own path, then from this
# process's. Not from the current directory: it may be that of a downloaded checkpoint.
_BOOT = """
import importlib, importlib.util, json, sys
given = json.loads(sys.argv[1])
sys.path += [path for path in given.pop("path") if path not in sys.path]
package = given.pop("package")
spec = importlib.util.spec_from_file_location(
    "hybridrt", package + "/__init__.py", submodule_search_locations=[package]
)
sys.modules["hybridrt"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["hybridrt"])
importlib.import_module(given.pop("module")).main(**given)
"""


def ending_of(status: int) -> str:
    """How a process ended, by its exit status as subprocess has it."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal has no name
        return f"was killed by signal {-status}"


def is_stopped(process: "subprocess.Popen[bytes]") -> bool:
    """Whether a signal has stopped a child that has not been continued since. False where the system has no
    waitid (macOS before Python 3.13)."""
    if not hasattr(os, "waitid"):
        return False
    try:  # WNOWAIT: the next call is told the same
        return os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # it has ended
        return False


def start_child(
    module: str, arguments: Mapping[str, Any], environment: Mapping[str, str], **options: Any
) -> "subprocess.Popen[bytes]":
    """Starts a process that calls `main(**arguments)` of a module. Ctrl-C does not reach it.

    Args:
        arguments: plain data, sent as JSON.
        environment: added to this process's.
        options: further arguments of subprocess.Popen.
    """
    here = os.path.realpath(os.curdir)
    given = {
        "package": str(Path(__file__).absolute().parents[1]),
        "path": [path for path in sys.path if os.path.isabs(path) and os.path.realpath(path) != here],
        "module": module, **arguments,
    }  # fmt: skip
    inherited = dict(os.environ)
    if "PYTHONPATH" in inherited:  # an empty or relative entry leads to the current directory
        entries = inherited["PYTHONPATH"].split(os.pathsep)
        inherited["PYTHONPATH"] = os.pathsep.join(filter(os.path.isabs, entries))
    command = [sys.executable, "-P", "-c", _BOOT, json.dumps(given)]
    return subprocess.Popen(command, env=inherited | dict(environment), start_new_session=True, **options)
