"""Sends tokens to the replicas that hold their experts, and brings back what the experts add."""

from collections.abc import Callable

import torch

from hybridrt.collectives.groups import TPGroup

Compute = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class ExpertExchange:
    """One layer's experts, cut over the replicas of `group` in order: `held` on each.

    A token goes once to each replica that holds any of its experts, and one sum comes back, so no
    more is sent than the routed tokens. All replicas call this for each layer, also without tokens.
    What other replicas add is summed in the order of replicas.

    Attributes:
        fixed: all replicas have equally many tokens, and each gets those of all. The host reads no
            numbers, so a graph can contain it.
        sent_rows: tokens and sums that this replica has sent to others, without those of graphs.
    """

    def __init__(self, group: TPGroup, held: int) -> None:
        self._group, self._held = group, held
        self.fixed, self.sent_rows = False, 0

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, compute: Compute) -> torch.Tensor:
        """What the experts add to x [T, D].

        Args:
            weights, ids: [T, k] float32 and int32, as of a router; -1: no expert of these replicas.
            compute: from tokens, weights and ids of this replica's experts to their sum.
        """
        if self.fixed:
            came = self._group.gather_rows(_packed(x, weights, ids))
            return self._group.scatter_sum(self._computed(came, x, weights, compute))
        rows, sends, gets = self._routes(ids)
        came = self._group.all_to_all(_packed(x[rows], weights[rows], ids[rows]), sends, gets)
        back = self._group.all_to_all(self._computed(came, x, weights, compute), gets, sends)
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for added, of in zip(back.split(sends), rows.split(sends), strict=True):
            total.index_add_(0, of, added.float())  # no row twice in a replica's part
        return total.to(x.dtype)

    def _routes(self, ids: torch.Tensor) -> tuple[torch.Tensor, list[int], list[int]]:
        """Which tokens go to the replicas, one after the other; how many to each, and from each."""
        group = self._group
        owners = ids.div(self._held, rounding_mode="floor")
        wanted = torch.stack([(owners == replica).any(1) for replica in range(group.size)])
        counts = wanted.sum(1)
        sends, gets = torch.stack((counts, group.all_to_all(counts))).tolist()  # sizes of messages
        rows = wanted.nonzero()[:, 1]
        self.sent_rows += sum(sends) - sends[group.rank] + sum(gets) - gets[group.rank]
        return rows, sends, gets

    def _computed(self, came: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, compute: Compute) -> torch.Tensor:
        """What this replica's experts add to tokens that came as `_packed`, like x and weights."""
        if not len(came):
            return x.new_empty(0, x.shape[1])
        width, top_k = x.shape[1] * x.element_size(), weights.shape[1]
        tokens, weights, ids = (
            part.contiguous().view(dtype)
            for part, dtype in zip(came.split((width, 4 * top_k, 4 * top_k), 1), (x.dtype, torch.float32, torch.int32))
        )
        first = self._group.rank * self._held
        return compute(tokens, weights, torch.where((ids >= first) & (ids < first + self._held), ids - first, -1))


def _packed(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[T, bytes] of each token and its choice, one message instead of three."""
    return torch.cat([each.contiguous().view(torch.uint8) for each in (x, weights, ids)], 1)
