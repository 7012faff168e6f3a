"""Modules of other engines, made of stubs, for as long as a test runs."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


@contextmanager
def installed(stub: ModuleType, modules: Mapping[str, Sequence[str]], plugin: str) -> Iterator[None]:
    """`modules` hold names of `stub`, and the package `integrations/{plugin}` can be imported."""
    before, paths = dict(sys.modules), list(sys.path)
    made = {name: ModuleType(name) for name in modules}
    for name, names in modules.items():
        vars(made[name]).update({each: getattr(stub, each) for each in names}, __path__=[])
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(made[parent], last, made[name])
    sys.modules.update(made)
    sys.path.insert(0, str(ROOT / "integrations" / plugin))
    try:
        yield
    finally:
        for name in sys.modules.keys() - before.keys():
            if name in made or name.startswith("hybridrt_"):
                del sys.modules[name]
        sys.path[:] = paths
