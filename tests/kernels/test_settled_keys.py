"""Keys of Triton functions are computed in one order in every process."""

import sys
from types import ModuleType
from typing import Any

import pytest

from hybridrt.kernels.core.launch import compute_keys


class Function:
    """In the place of a Triton function: it notes when its key is computed."""

    def __init__(self, name: str, module: str, noted: list[str]) -> None:
        self.name, self.__module__, self._noted = name, module, noted

    @property
    def cache_key(self) -> str:
        self._noted.append(self.name)
        return self.name


def test_imported_functions_come_first_and_helpers_before_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    noted: list[str] = []
    helpers, kernels = ModuleType("helpers"), ModuleType("kernels")

    def add(module: ModuleType, **names: Any) -> None:
        vars(module).update(names)

    add(helpers, inner=Function("inner", "helpers", noted), outer=Function("outer", "helpers", noted))
    add(kernels, number=1, first=Function("first", "kernels", noted), outer=vars(helpers)["outer"])
    add(kernels, kernel=Function("kernel", "kernels", noted))
    for module in (helpers, kernels):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    compute_keys(kernels)
    firsts = list(dict.fromkeys(noted))
    assert firsts.index("inner") < firsts.index("outer") < firsts.index("kernel")
    assert firsts.index("first") < firsts.index("kernel")
