import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow
KERNELS = ROOT / "hybridrt" / "kernels"


def test_every_kernel_compiles_for_sm90_with_and_without_its_optional_arguments() -> None:
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.support.sm90_optional"]
    found = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
    launched = {
        f"{file.stem} {name}" for file in KERNELS.glob("*_triton.py")
        for name in re.findall(r"^    *(?:return )?(_\w+_kernel)\[", file.read_text(), re.MULTILINE)
    }  # fmt: skip
    assert len(launched) > 40 and launched - set(found.stdout.splitlines()) == set()
