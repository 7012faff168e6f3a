"""The target's own multi-token-prediction head as drafter, with KV in the target's pages."""

from collections.abc import Sequence

from hybridrt.base.engine_config import EngineConfig
from hybridrt.base.model_config import ModelConfig
from hybridrt.models.base import CausalLM
from hybridrt.models.registry import make_mtp_head
from hybridrt.runtime.load.draft_needs import DraftRow, DraftTarget, Everywhere
from hybridrt.runtime.load.graph_costs import graph_rows, step_widths
from hybridrt.runtime.load.target import RunTarget
from hybridrt.speculative.draft import Draft, with_others
from hybridrt.speculative.drafter import Drafter, DraftRequest
from hybridrt.speculative.head import HeadRunner
from hybridrt.speculative.method import DraftMethod


class MTPDrafter(Drafter):
    """Draws a chain from the head; with topk > 1 one place per topk drafts, and the likeliest other
    tokens there.

    Args:
        everywhere: drafts with the head of every rank.
        num_draft_tokens: most drafts of a request; its KV pages have room for them.
    """

    def __init__(self, everywhere: Everywhere, num_draft_tokens: int, topk: int = 1) -> None:
        self.everywhere, self.longest, self.topk = everywhere, num_draft_tokens, topk

    def propose(self, requests: Sequence[DraftRequest], max_drafts: Sequence[int]) -> list[Draft]:
        max_drafts = [min(n, self.longest) for n in max_drafts]
        steps = -(-max(max_drafts, default=0) // self.topk)
        if not steps:
            return [Draft() for _ in requests]
        drawn = self.everywhere([_row(request) for request in requests], steps, self.topk).result()
        return [self._draft(tokens, n) for tokens, n in zip(drawn.tokens, max_drafts, strict=True)]

    def _draft(self, tokens: Sequence[int], max_drafts: int) -> Draft:
        """`tokens`: for each place its draft, then the likeliest."""
        width = 1 + self.topk
        places = [tokens[i : i + width] for i in range(0, len(tokens), width)][: -(-max_drafts // self.topk)]
        others = [[t for t in likely if t != drawn][: self.topk - 1] for drawn, *likely in places]
        # -1: the logits are not finite.
        return with_others([max(drawn, 0) for drawn, *_ in places], others, max_drafts)


def _row(request: DraftRequest) -> DraftRow:
    assert request.row is not None, "only running requests are drafted for"
    return DraftRow(request.row.index, request.computed, request.end_page, len(request.output), request.params)


class MTPMethod(DraftMethod):
    """Drafts by the checkpoint's prediction head."""

    on_device = True

    def attach(self, model: CausalLM) -> None:
        model.attach_mtp(make_mtp_head(model))

    def kv_layers(self, model: ModelConfig) -> tuple[int, ...]:
        return model.mtp_attention_layer_ids

    def row_pages(self, config: EngineConfig) -> int:
        """The head writes its drafts' keys and values before the scheduler has lent pages for them.
        The first one is in a lent page, or begins a page."""
        return -(-(config.num_verify_tokens - 2) // config.page_size)

    def row_bytes(self, config: EngineConfig, target: RunTarget, max_len: int) -> int:
        """Two hidden states and a token."""
        return 2 * target.model_config.hidden_size * target.dtype.itemsize + 4

    def fixed_bytes(self, config: EngineConfig, target: RunTarget) -> int:
        """The hidden states that the target's graphs keep, and the logits of the head's own."""
        numbers = sum(step_widths(config)) * target.model_config.hidden_size + target.model_config.vocab_size
        return graph_rows(config, target) * numbers * target.dtype.itemsize

    def device_drafter(self, runner: DraftTarget) -> HeadRunner:
        return HeadRunner(runner, self.row_pages(runner.config))

    def drafter(self, runner: DraftTarget, everywhere: Everywhere) -> Drafter:
        spec = runner.config.speculative
        assert spec is not None
        return MTPDrafter(everywhere, spec.num_draft_tokens, spec.topk)


METHOD = MTPMethod()
