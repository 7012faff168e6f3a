"""Keeps the steps of replicas together that share experts."""

from collections.abc import Iterator
from contextlib import contextmanager

from hybridrt.collectives.groups import TPGroup
from hybridrt.layers.moe import experts_of, join_exchanges
from hybridrt.models.base import CausalLM

NO_STEP, EAGER = 0, 2**30


class LockStep:
    """In each round a replica launches a step, or joins those of the others: it computes its experts
    for their tokens. The hosts of all replicas meet once a round, before the step. If all steps of a
    round have graphs, all replicas replay the graph of the largest; else none replays one.

    Args:
        group: this replica among all.

    Attributes:
        rounds: in which this replica took part.
        failed: a step of this replica ended between two layers, so that the others wait in vain.
    """

    def __init__(self, model: CausalLM, group: TPGroup) -> None:
        self._model, self._group = model, group
        self.rounds, self.failed = 0, False

    @contextmanager
    def round(self, rows: int) -> Iterator[int]:
        """A context for this replica's part in the next round. RankError if another one is lost.

        Args:
            rows: of the graph for this replica's step; EAGER: it has none. NO_STEP: it has no step.

        Returns:
            rows of the graph that all replay; EAGER, or NO_STEP if no replica has a step.
        """
        self.rounds += 1
        agreed = self._group.maximum(rows)
        self.failed = True
        yield agreed
        self.failed = False

    def join(self) -> None:
        """Takes part in the layers of an eager step without tokens."""
        join_exchanges(self._model.stack)

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """A context in which steps are recorded in graphs, by all replicas alike."""
        exchanges = [each.exchange for each in experts_of(self._model) if each.exchange is not None]
        try:
            for exchange in exchanges:
                exchange.fixed = True
            yield
        finally:
            for exchange in exchanges:
                exchange.fixed = False
