"""A small engine with conventions of its own over hybridrt.embedding. It plans each step before the one before has run.

Its KV blocks count from 0, its dummy row is the last one, its state slots count from 1. Steps that only decode are
filled up with the dummy row. It works out on the device where tokens lie. A request that finds no block makes the last
arrival give up its own. That one starts again later, with the tokens that it has.

python examples/foreign_engine.py [MODEL]
"""

import sys
from collections import deque
from dataclasses import dataclass, field

import torch

from hybridrt.embedding import EngineConfig, ForwardBatch, Scratch, build, load, plan_memory


@dataclass(eq=False)
class Job:
    """`known` are the tokens that the host has read, the prompt first; there will be `end` of them. Planned steps
    compute `planned` tokens, of which the first `start` are prefilled."""

    known: list[int]
    end: int
    start: int = 0
    planned: int = 0
    row: int = -1
    blocks: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Step:
    """A planned step. Which tokens its first `decodes` rows compute is not known before the step before has run."""

    work: list[tuple[Job, bool]]  # and whether the job gains a token
    batch: ForwardBatch
    ids: torch.Tensor
    rows: torch.Tensor
    decodes: int
    leaving: list[Job]  # whose rows and blocks are free once the step has run


class ForeignEngine:
    """Greedy. `num_blocks` limits the blocks in use, so that requests run out of them."""

    def __init__(self, config: EngineConfig, budget_bytes: int, num_blocks: int | None = None) -> None:
        self.loaded = loaded = load(config)
        plan = plan_memory(loaded, budget_bytes=budget_bytes)
        self.runtime = build(loaded, plan, Scratch(row=-1, state_slot=0, page=-1))
        self.block_size, self.chunk = plan.page_size, config.chunked_prefill_size
        self.dummy, self.free_rows = plan.num_rows, list(range(plan.num_rows))[::-1]
        self.has_kv, self.num_blocks = plan.num_pages > 0, num_blocks or plan.num_pages
        self.free_blocks = list(range(self.num_blocks))[::-1]
        self.last = torch.zeros(plan.num_rows + 1, dtype=torch.int32, device=self.runtime.device)
        self.waiting, self.running = deque[Job](), list[Job]()
        self.preempted = 0

    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        jobs = [Job(list(prompt), len(prompt) + num_tokens) for prompt in prompts]
        self.waiting.extend(jobs)
        step = None
        while step is not None or self.waiting or self.running:
            following = self.plan(step)
            if step is not None:
                self.run(step)
            step = following
        return [job.known[len(prompt) :] for job, prompt in zip(jobs, prompts)]

    def plan(self, underway: Step | None) -> Step | None:
        """A token of each job that decodes, then chunks of prompts; None if nothing can be done."""
        while self.waiting and self.free_rows:
            job = self.waiting.popleft()
            job.row, job.start, job.planned = self.free_rows.pop(), len(job.known), 0
            self.runtime.admit([job.row], [job.row + 1])
            self.running.append(job)
        decodes, chunks, room = list[tuple[Job, int]](), list[tuple[Job, int]](), self.chunk
        for job in tuple(self.running):
            count = min(job.start - job.planned, room) if job.planned < job.start else 1
            if job in self.running and count and self.reserve(job, job.planned + count, underway):
                (decodes if job.planned >= job.start else chunks).append((job, count))
                room -= count if job.planned < job.start else 0
        return self.prepare(decodes, chunks) if decodes or chunks else None

    def prepare(self, decodes: list[tuple[Job, int]], chunks: list[tuple[Job, int]]) -> Step:
        work, padding = decodes + chunks, 0 if chunks else self.dummy - len(decodes)
        rows = [job.row for job, _ in work] + [self.dummy] * padding
        prompts = [token for job, count in chunks for token in job.known[job.planned : job.planned + count]]
        device, split = self.runtime.device, len(decodes) + padding
        ids = torch.tensor([0] * split + prompts, dtype=torch.int32, device=device)
        batch = self.runtime.batch(
            input_ids=ids, rows=rows, seq_lens=[job.planned + count for job, count in work] + [1] * padding,
            query_lens=[count for _, count in work] + [1] * padding, num_decode_rows=split,
        )  # fmt: skip
        self.runtime.prepare(batch)
        for job, count in work:
            job.planned += count
        finished = [job for job, _ in work if job.planned == job.end - 1]
        self.running = [job for job in self.running if job not in finished]
        gains = [(job, job.planned >= job.start) for job, _ in work]
        return Step(gains, batch, ids, torch.tensor(rows, device=device), split, finished)

    def run(self, step: Step) -> None:
        step.ids[: step.decodes] = self.last[step.rows[: step.decodes]]
        hidden = self.runtime.forward(step.batch)
        if step.decodes:
            self.runtime.commit(step.batch)
        tokens = self.runtime.logits(hidden[step.batch.query_start_loc[1:].long() - 1]).argmax(-1)
        self.last[step.rows] = tokens.int()
        for (job, gains), token in zip(step.work, tokens.tolist()):
            job.known += [token] * gains
        for job in step.leaving:
            self.leave(job)

    def leave(self, job: Job) -> None:
        """No planned step names the job. If it has more to gain, it comes back."""
        self.free_rows.append(job.row)
        self.free_blocks += job.blocks
        job.blocks = []
        if len(job.known) < job.end:
            self.waiting.appendleft(job)

    def reserve(self, job: Job, length: int, underway: Step | None) -> bool:
        """Blocks for so many tokens. If there are none, a request is preempted after the step that is underway."""
        first = len(job.blocks)
        need = -(-length // self.block_size) - first if self.has_kv else 0
        if need > len(self.free_blocks):
            if first + need > self.num_blocks:
                raise MemoryError(f"a request of {length} tokens does not fit into the blocks")
            if underway is None or not underway.leaving:
                victim, self.preempted = self.running.pop(), self.preempted + 1
                self.leave(victim) if underway is None else underway.leaving.append(victim)
            return False
        if need > 0:
            job.blocks += [self.free_blocks.pop() for _ in range(need)]
            size, device = self.block_size, self.runtime.device
            offsets, blocks = torch.arange(size, device=device), torch.tensor(job.blocks[first:], device=device)
            places = (blocks[:, None] * size + offsets).flatten()
            positions = torch.arange(len(places), device=device) + first * size
            self.runtime.write_tokens(torch.full_like(places, job.row), positions, places)
        return True


def main(model: str) -> None:
    engine = ForeignEngine(EngineConfig(model, max_running_requests=2, max_model_len=256), budget_bytes=2**28)
    tokenizer = engine.loaded.tokenizer()
    assert tokenizer is not None, f"{model} has no tokenizer"
    texts = ["def read_lines(path):", "import ", "class Stack:"]
    for text, output in zip(texts, engine.generate([tokenizer.encode(t) for t in texts], 64)):
        print(f"{text}{tokenizer.decode(output)}\n")


if __name__ == "__main__":
    main(*sys.argv[1:] or ["embedded"])
