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
        sent_rows: tokens and sums that this replica has sent to others.
    """

    def __init__(self, group: TPGroup, held: int) -> None:
        self._group, self._held = group, held
        self.sent_rows = 0

    def __call__(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, compute: Compute) -> torch.Tensor:
        """What the experts add to x [T, D].

        Args:
            weights, ids: [T, k] float32 and int32, as of a router; -1: no expert of these replicas.
            compute: from tokens, weights and ids of this replica's experts to their sum.
        """
        group, held = self._group, self._held
        owners = ids.div(held, rounding_mode="floor")
        wanted = torch.stack([(owners == replica).any(1) for replica in range(group.size)])
        counts = torch.stack((wanted.sum(1), group.all_to_all(wanted.sum(1))))
        sends, gets = counts.tolist()  # the sizes of the next messages
        rows = wanted.nonzero()[:, 1]
        choice = torch.cat((ids[rows], weights[rows].view(torch.int32)), 1)
        came, choice = (group.all_to_all(each, sends, gets) for each in (x[rows], choice))
        ids, weights = choice.chunk(2, 1)
        first = group.rank * held
        own = torch.where((ids >= first) & (ids < first + held), ids - first, -1)
        y = compute(came, weights.contiguous().view(torch.float32), own) if len(came) else came
        back = group.all_to_all(y, gets, sends)
        self.sent_rows += len(rows) - sends[group.rank] + len(y) - gets[group.rank]
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for added, of in zip(back.split(sends), rows.split(sends), strict=True):
            total.index_add_(0, of, added.float())  # no row twice in a replica's part
        return total.to(x.dtype)
