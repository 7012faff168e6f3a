"""Prints the oldest version of each dependency that pyproject.toml accepts, as constraints for pip.

python -m scripts.pins > oldest.txt && PIP_CONSTRAINT=oldest.txt .ci/run
"""

import re
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
EXTRAS = ("structured", "serve", "otlp")  # those that the tests install


def oldest(project: dict[str, Any]) -> list[str]:
    """A line such as "numpy==1.26" for each dependency, and for those of EXTRAS."""
    lines = [*project["dependencies"], *(line for extra in EXTRAS for line in project["optional-dependencies"][extra])]
    bounds = (re.match(r"([\w-]+)>=([\d.]+)", line) for line in lines)
    return sorted(f"{found[1]}=={found[2]}" for found in bounds if found)


if __name__ == "__main__":
    print(*oldest(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]), sep="\n")
