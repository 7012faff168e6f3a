"""What a sliding window forgets and a history branch remembers: two small models' recall of facts, by distance.

A sequence names facts ("key 2 is value 5", one token) among filler and later asks for one ("key 2?"). Two swa_ssm
models are trained in plain PyTorch, one with history branches and one without; both are then evaluated through the
runtime (LLM): how often is the answer right, against how far the fact lies beyond the window?

    python -m benchmarks.recall_study --out study                  # trains (minutes on a CPU), evaluates, plots
    python -m benchmarks.recall_study --out study --evaluate-only  # the models that are there
"""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.common import environment
from benchmarks.swa_ssm_reference import SwaSsmReference
from hybridrt import LLM, SamplingParams
from hybridrt.models.swa_ssm import SwaSsmConfig

WINDOW, LAYERS = 16, 2
NAMES = {"enabled": "window and history", "disabled": "window alone"}


@dataclass(frozen=True)
class Task:
    """Token ids: fillers, then a fact for every (key, value), a question for every key, an answer for every value."""

    fillers: int = 16
    keys: int = 4
    values: int = 8

    @property
    def vocab_size(self) -> int:
        return self.answer(self.values)

    def fact(self, key: Any, value: Any) -> Any:
        return self.fillers + key * self.values + value

    def question(self, key: Any) -> Any:
        return self.fillers + self.keys * self.values + key

    def answer(self, value: Any) -> Any:
        return self.fillers + self.keys * self.values + self.keys + value

    def batch(self, size: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Sequences [size, length] in which every key's fact comes once, and later its question and the answer; and the
        targets [size, length]: the answer at each question, -100 elsewhere."""
        ids = torch.randint(self.fillers, (size, length), generator=generator)
        targets = torch.full_like(ids, -100)
        values = torch.randint(self.values, (size, self.keys), generator=generator)
        for row in range(size):
            # 2 x keys distinct places, two tokens wide; of the two that a key gets, the earlier one is its fact's.
            places = 2 * torch.randperm(length // 2, generator=generator)[: 2 * self.keys].view(self.keys, 2)
            asked, told = places.max(1).values, places.min(1).values
            key = torch.arange(self.keys)
            ids[row, told] = self.fact(key, values[row])
            ids[row, asked] = self.question(key)
            ids[row, asked + 1] = targets[row, asked] = self.answer(values[row])
        return ids, targets

    def prompts(self, distance: int, count: int, generator: torch.Generator) -> tuple[list[list[int]], list[int]]:
        """`count` prompts that end with a question whose fact stands `distance` tokens before it, and the answers. The
        other keys' facts stand around that fact."""
        prompts, answers = [], []
        for _ in range(count):
            values = torch.randint(self.values, (self.keys,), generator=generator).tolist()
            order = torch.randperm(self.keys, generator=generator).tolist()
            facts = [self.fact(key, values[key]) for key in order]
            which = int(torch.randint(max(self.keys - distance, 0), self.keys, (1,), generator=generator))
            before = torch.randint(self.fillers, (12,), generator=generator).tolist()
            gap = distance - (self.keys - which)
            after = torch.randint(self.fillers, (max(gap, 0),), generator=generator).tolist()
            prompts.append([*before, *facts, *after, self.question(order[which])])
            answers.append(self.answer(values[order[which]]))
        return prompts, answers


def model_config(task: Task, mode: str, hidden: int = 64) -> SwaSsmConfig:
    return SwaSsmConfig(
        vocab_size=task.vocab_size, hidden_size=hidden, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, intermediate_size=2 * hidden, sliding_window=WINDOW, ssm_intermediate_size=2 * hidden,
        ssm_state_size=16, history_mode=mode, max_position_embeddings=4096,
    )  # fmt: skip


def train(
    config: SwaSsmConfig, task: Task, args: argparse.Namespace, path: Path
) -> tuple[SwaSsmReference, list[dict[str, float]]]:
    """A trained model, saved in `path`, and its loss and accuracy on the training batches along the way."""
    torch.manual_seed(args.seed)
    generator = torch.Generator().manual_seed(args.seed)
    model, started, curve = SwaSsmReference(config), time.perf_counter(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.steps, pct_start=0.1)
    for step in range(1, args.steps + 1):
        # Short sequences as often as long ones: there, questions are dense and facts are near.
        shortest = 4 * task.keys
        length = int(shortest * (args.length / shortest) ** torch.rand((), generator=generator).item())
        ids, targets = task.batch(args.batch, length, generator)
        asked = targets >= 0
        logits = model(ids)[asked]
        loss = F.cross_entropy(logits, targets[asked])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % max(args.steps // 20, 1) == 0 or step == args.steps:
            right = (logits.argmax(-1) == targets[asked]).float().mean().item()
            point = {"step": step, "loss": loss.item(), "accuracy": right, "seconds": time.perf_counter() - started}
            print("  ".join(f"{name} {value:.4g}" for name, value in point.items()), flush=True)
            curve.append(point)
    config.save(path, dtype="float32")
    save_file(model.state_dict(), path / "model.safetensors")
    return model, curve


def evaluate(
    path: Path, task: Task, distances: Sequence[int], device: str, count: int, **options: Any
) -> dict[int, float]:
    """Share of right answers at each distance. Chunks and pages are short: a fact's keys and values have been given
    back, and other prompts write where they stood, long before its question comes."""
    generator, recall = torch.Generator().manual_seed(1234), dict[int, float]()
    with LLM(str(path), device=device, max_running_requests=32, chunked_prefill_size=48, page_size=4, **options) as llm:
        for distance in distances:
            prompts, answers = task.prompts(distance, count, generator)
            outputs = llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0))
            right = sum(o.token_ids[0] == a for o, a in zip(outputs, answers, strict=True))
            recall[distance] = right / len(prompts)
    return recall


def plot(found: dict[str, dict[str, Any]], trained: int, chance: float, path: Path) -> None:
    """Recall against distance beyond the window, as a small SVG."""
    import matplotlib

    matplotlib.rcParams.update({"backend": "svg", "svg.hashsalt": "hybridrt"})  # the same numbers, the same file
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6.5, 3.7), layout="constrained")
    for mode, colour in (("enabled", "tab:blue"), ("disabled", "tab:orange")):
        recall = {int(d) - (WINDOW - 1): share for d, share in found[mode]["recall"].items()}
        axis.plot(list(recall), list(recall.values()), "o-", color=colour, label=NAMES[mode], markersize=3)
    axis.axhline(chance, color="grey", ls=":", label="guessing")
    reach = {
        0: "one window",
        (LAYERS - 1) * (WINDOW - 1): f"{LAYERS} layers\nof windows",
        trained - WINDOW: "longest\ntrained",
    }
    for x, text in reach.items():
        axis.axvline(x, color="lightgrey", lw=1, zorder=0)
        axis.text(x, 1.05, text, ha="center", va="bottom", fontsize=8)
    axis.set_xscale("symlog", linthresh=WINDOW)
    ticks = [1 - WINDOW, 0, WINDOW - 1, 50, 100, 200, 500]
    axis.set_xticks(ticks, [str(tick) for tick in ticks], minor=False)
    axis.set(xlabel="distance of the fact beyond the window, in tokens", ylabel="recall", ylim=(0, 1.04))
    axis.legend(loc="center left")
    figure.savefig(path, metadata={"Date": None})


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for both models, recall.json and the plot")
    add("--steps", type=int, default=1600, help="of each model (%(default)s)")
    add("--batch", type=int, default=32, help="sequences a step (%(default)s)")
    add("--length", type=int, default=192, help="tokens of a training sequence (%(default)s)")
    add("--lr", type=float, default=3e-3, help="peak learning rate (%(default)s)")
    add("--prompts", type=int, default=200, help="evaluated at each distance (%(default)s)")
    add("--seed", type=int, default=0, help="(%(default)s)")
    add("--device", default="cpu", help="that evaluates (%(default)s)")
    add("--evaluate-only", action="store_true", help="no training: the models are in --out")
    return parser.parse_args()


def main() -> None:
    """Trains both models, evaluates them, writes recall.json and hybrid-recall.svg."""
    args, task = parse_args(), Task()
    log: dict[str, Any] = {
        "environment": environment(),
        "arguments": {k: v for k, v in vars(args).items() if k != "out"},
    }
    distances = [1, 2, 4, 8, 12, 15, 16, 18, 20, 24, 28, 30, 32, 36, 48, 64, 96, 128, 176, 256, 384, 512]
    for mode in NAMES:
        path, log[mode] = args.out / mode, {}
        if not args.evaluate_only:
            print(NAMES[mode], flush=True)
            model, curve = train(model_config(task, mode), task, args, path)
            log[mode] = {"parameters": sum(p.numel() for p in model.parameters()), "training": curve}
        log[mode]["recall"] = evaluate(path, task, distances, args.device, args.prompts)
        print({distance: round(share, 3) for distance, share in log[mode]["recall"].items()}, flush=True)
    (args.out / "recall.json").write_text(json.dumps(log, indent=1) + "\n")
    plot({mode: log[mode] for mode in NAMES}, args.length, 1 / task.values, args.out / "hybrid-recall.svg")


if __name__ == "__main__":
    main()
