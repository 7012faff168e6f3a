"""The process of a tensor-parallel rank above 0, until it has imported torch."""

from hybridrt.base.cuda_driver import start_driver


def main(directory: str, rank: int, size: int, kind: str, ahead: str | None) -> None:
    """As `hybridrt.parallel.follower.main`. The GPU's context is made while torch is imported: either takes seconds."""
    if kind == "cuda":
        start_driver(rank)
    from hybridrt.parallel import follower

    follower.main(directory, rank, size, kind, ahead)
