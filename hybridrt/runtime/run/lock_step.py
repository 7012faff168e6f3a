"""Keeps the steps of replicas together that share experts."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from hybridrt.collectives.groups import TPGroup
from hybridrt.layers.moe import join_exchanges
from hybridrt.models.base import CausalLM


class LockStep:
    """In each round a replica launches a step, or joins those of the others: it computes its experts
    for their tokens. The hosts of all replicas meet once a round, before the step.

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
    def step(self) -> Iterator[None]:
        """A context for this replica's step of the next round. RankError if another one is lost."""
        self._meet(1)
        self.failed = True
        yield
        self.failed = False

    @torch.inference_mode()
    def join(self) -> bool:
        """Takes part in the next round without a step. Returns whether another replica has one."""
        if not self._meet(0):
            return False
        self.failed = True
        join_exchanges(self._model.stack)
        self.failed = False
        return True

    def _meet(self, steps: int) -> int:
        self.rounds += 1
        return self._group.count(steps)
