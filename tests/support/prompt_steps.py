"""Random steps with prompts, for tests of their graphs, and graphs for a runner on a CPU."""

import random
from collections.abc import Sequence
from functools import partial

from hybridrt.runtime.replay.prompt_graphs import PromptGraphs
from hybridrt.runtime.run.step_runner import StepRunner
from hybridrt.runtime.step.pack import enter_tables
from hybridrt.runtime.step.pack_padded import PROMPT_ROWS
from hybridrt.runtime.step.plan import DecodeRow, DecodeRows, ExtendRow, StepPlan
from tests.support.checkpoints import VOCAB


def capture_prompts(
    runner: StepRunner, sizes: tuple[Sequence[int], Sequence[int]], *, saves: bool, exact_lens: bool = True
) -> PromptGraphs:
    """Gives a runner graphs of the first sizes that hold 48 prompt tokens, which it replays from then on. `sizes`,
    `saves` and `exact_lens` as in PromptGraphs."""
    runner.prompt_graphs = graphs = PromptGraphs(
        model=runner.model, backend=runner.backend, req_to_token_pool=runner.pools.req_to_token,
        last_tokens=runner.last_tokens, max_bs=max(sizes[0]), max_tokens=48, saves=saves, sizes=sizes,
        enter_tables=partial(enter_tables, runner.pools, runner.sampling_table),
    )  # fmt: skip
    graphs.exact_lens = exact_lens
    graphs.capture()
    return graphs


class Play:
    """Prompts in chunks, some of which save states, next to rows that decode. All rows are admitted and have pages.

    Args:
        computed: tokens that each row has already; steps add theirs.
        spare: the first of PROMPT_ROWS state slots that belong to no row; None: no states are saved.
        most_saves: states that a chunk saves.
        tokens: most prompt tokens of a step; longest: most tokens of a row.
        decoding: most decode rows; prompts: most chunks.
    """

    def __init__(
        self, computed: dict[int, int], spare: int | None, seed: int, *, tokens: int = 48, longest: int = 90,
        decoding: int = 3, prompts: int = PROMPT_ROWS, most_saves: int = 1,
    ) -> None:  # fmt: skip
        self._most_saves = most_saves
        self.computed, self._spare, self._random = computed, spare, random.Random(seed)
        self._tokens, self._longest, self._decoding, self._prompts = tokens, longest, decoding, prompts

    def step(self) -> StepPlan:
        """At least one chunk, if any row has room left."""
        draw = self._random
        order = draw.sample(sorted(self.computed), len(self.computed))
        chosen = order[: draw.randint(0, self._decoding)]
        decoding = [row for row in chosen if 0 < self.computed[row] < self._longest]
        prompts = [row for row in order if row not in decoding and self.computed[row] < self._longest]
        chunks, left = list[ExtendRow](), draw.randint(1, self._tokens)
        for row in prompts[: draw.randint(1, self._prompts)]:
            length = min(draw.randint(1, max(self._tokens // 2, 2)), left, self._longest - self.computed[row])
            if length > 0:
                chunks.append(self._chunk(row, length, len(chunks)))
                left -= length
        decode = DecodeRows.from_rows(DecodeRow(row, self.computed[row], 0) for row in decoding)
        for row in decoding:
            self.computed[row] += 1
        return StepPlan(decode=decode, extend=chunks)

    def _chunk(self, row: int, length: int, index: int) -> ExtendRow:
        start, saves, draw = self.computed[row], list[tuple[int, int]](), self._random
        if self._spare is not None and length > 1 and draw.random() < 0.7:
            saves = [(draw.randint(max(length - 6, 1), length - 1), self._spare + index)]
            if self._most_saves > 1:  # later chunks have no slots left
                second = (draw.randint(0, saves[0][0] - 1), self._spare + PROMPT_ROWS - 1 - index)
                saves = [] if index >= PROMPT_ROWS // 2 else [second, *saves] if second[0] else saves
        self.computed[row] = start + length
        tokens = [draw.randrange(3, VOCAB) for _ in range(length)]
        return ExtendRow(row, start, tokens, 0, draw.random() < 0.7, saves=saves)
