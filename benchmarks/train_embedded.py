"""Train the two small Falcon-H1 models that ship inside hybridrt.

The *embedded* model is what ``hybridrt generate`` runs when no model is named; the *draft* is a smaller one with the
same tokenizer, for speculative decoding.  Both learn from the Python standard library of the interpreter that runs
this script (or ``--source``): collect the files, train a tokenizer, train the main model on random windows of the
text, train the draft to predict what the main model predicts, and write both as Hugging Face directories.

The network is transformers' own but for the Mamba-2 mixer: :class:`TrainingMixer` computes what the stock mixer does
from the same parameters, through :func:`chunked_ssd`, which is far cheaper to train through.  :func:`save` loads the
result into the stock model and compares the logits.

    python benchmarks/train_embedded.py --out /tmp/embedded --compile
    python benchmarks/train_embedded.py --out /tmp/try --small --steps 20 --draft-steps 20
    python benchmarks/train_embedded.py --sample hybridrt/assets/embedded
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import platform
import sysconfig
import tokenize
from pathlib import Path
from time import perf_counter as clock
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, FalconH1Config, GenerationConfig
from transformers import FalconH1ForCausalLM as Model
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Mixer

Curve: TypeAlias = list[dict[str, float]]
END, PAD = "<|endoftext|>", "<|pad|>"
PROMPTS = ("def read_lines(path):", "class Queue:\n    def __init__(self", "import os\n\n", "for name in sorted(")
# Generated tables, deliberately broken sources and a documentation dump: not code to imitate.
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__", "encodings", "pydoc_data", "data"}
NOTICE = """\
The weights and the tokenizer in this folder were trained on the Python standard library, which is Copyright (c) 2001
Python Software Foundation; All Rights Reserved, under the PSF License (https://docs.python.org/3/license.html).
hybridrt's benchmarks/train_embedded.py made these files; docs/embedded-model.md describes them.
"""
SHAPES = {  # hidden size, layers, MLP width, attention heads, key-value heads, Mamba-2 heads
    "embedded": (256, 4, 704, 4, 2, 8),
    "embedded_draft": (128, 2, 256, 2, 1, 4),
    "small": (64, 2, 64, 2, 1, 2),
}


def read_sources(root: Path, limit: int | None) -> tuple[list[str], list[str]]:
    """The (training, held-out) file texts under ``root``; a hash of its path holds out one file in twenty."""
    train: list[str] = []
    held_out: list[str] = []
    for path in sorted(root.rglob("*.py"))[:limit]:
        name = path.relative_to(root)
        if SKIPPED_FOLDERS & set(name.parts) or path.name.startswith("bad"):
            continue
        try:
            with tokenize.open(path) as file:  # honours a "coding:" line
                text = file.read().replace("\r\n", "\n")
        except (SyntaxError, UnicodeDecodeError):
            continue
        if sum(c.isalpha() or c in " \n_" for c in text) < 0.7 * len(text):  # tables of numbers and escapes
            continue
        digest = hashlib.blake2b(name.as_posix().encode(), digest_size=4).digest()
        (held_out if int.from_bytes(digest, "big") % 20 == 0 else train).append(text)
    return train, held_out


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer whose pieces follow Python's shape.

    A line break and the indentation after it are one piece, hence usually one token; a word takes the single character
    before it along (``.join``, ``(self``).  Every byte is in the alphabet, so any text survives the round trip.
    """
    pieces = (
        r"[^\r\n\p{L}\p{N}_]?[\p{L}_]+"  # a word or identifier, with one leading mark
        r"| ?\p{N}{1,3}"  # digits, at most three to a piece
        r"| ?[^\s\p{L}\p{N}_]+"  # operators and brackets
        r"|\s*\n[ \t]*"  # line breaks and the next line's indentation
        r"|[ \t]+"
    )
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(pieces), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[END, PAD], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    for text in ("    x\t=\n\n\n\t\t1  # é 世界 🐍 \r\n", " a", "\n"):
        assert tokenizer.decode(tokenizer.encode(text).ids) == text, text
    return tokenizer


def to_stream(texts: list[str], tokenizer: Tokenizer, device: str) -> Tensor:
    """All texts as one token sequence, each followed by the end token, in a shuffled order."""
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()
    encoded = tokenizer.encode_batch([texts[i] for i in order])
    return torch.tensor([t for e in encoded for t in (*e.ids, tokenizer.token_to_id(END))], device=device)


def model_config(tokenizer: Tokenizer, shape: tuple[int, int, int, int, int, int]) -> FalconH1Config:
    """A configuration of one of SHAPES, with multipliers of the published Falcon-H1 models' kind."""
    hidden, layers, mlp, heads, kv_heads, mamba_heads = shape
    end, pad = tokenizer.token_to_id(END), tokenizer.token_to_id(PAD)
    attention = dict(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=hidden // heads)
    mamba = dict(mamba_n_heads=mamba_heads, mamba_d_head=64, mamba_d_ssm=64 * mamba_heads, mamba_d_state=64)
    multipliers = dict(embedding_multiplier=4.0, lm_head_multiplier=0.5, key_multiplier=0.5, ssm_out_multiplier=0.5)
    return FalconH1Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=hidden,
        num_hidden_layers=layers,
        intermediate_size=mlp,
        **attention,
        **mamba,
        **multipliers,
        mamba_chunk_size=64,
        ssm_multipliers=[0.75, 1.0, 0.5, 0.5, 1.0],
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        initializer_range=0.04,
        **dict(bos_token_id=end, eos_token_id=end, pad_token_id=pad),
    )


def chunked_ssd(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, size: int) -> Tensor:
    """Mamba-2's recurrence over whole sequences, ``size`` steps at a time.

    Per head, with a (head_dim, state) matrix S: ``S_t = exp(dt_t a) S_{t-1} + dt_t x_t b_t^T`` and ``y_t = S_t c_t``.
    x is (batch, length, heads, head_dim), dt (batch, length, heads) and a (heads,); b and c are (batch, length, state),
    shared by all heads.  The length must be a multiple of ``size``.
    """
    batch, length, heads, head_dim = x.shape
    x = (x * dt[..., None]).view(batch, -1, size, heads, head_dim)
    b, c = (v.view(batch, -1, size, v.shape[-1]) for v in (b, c))
    log_decay = (dt * a).view(batch, -1, size, heads).permute(0, 3, 1, 2)  # batch, head, chunk, step
    total = log_decay.cumsum(-1)

    # Within a chunk: causal attention whose scores are c.b times the decay from source to target.
    causal = torch.ones(size, size, dtype=torch.bool, device=x.device).tril()
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(~causal, -torch.inf).exp()
    scores = (c @ b.transpose(-1, -2))[:, None] * decay
    y = torch.einsum("bhkts,bkshp->bkthp", scores, x)

    # What each chunk adds to the state by its end, then the state that enters each chunk.
    to_end = (total[..., -1:] - total).exp().permute(0, 2, 3, 1)[..., None]
    added = torch.einsum("bksn,bkshp->bkhpn", b, x * to_end)
    before = F.pad(total[..., -1], (1, 0)).cumsum(-1)  # log decay of all the chunks before k
    chunks = length // size
    later = torch.ones(chunks, chunks, dtype=torch.bool, device=x.device).tril(-1)
    carry = (before[..., :-1, None] - before[..., None, 1:]).masked_fill(~later, -torch.inf).exp()
    entering = torch.einsum("bhkj,bjhpn->bkhpn", carry, added)
    from_before = torch.einsum("bktn,bkhpn->bkthp", c, entering)
    y = y + from_before * total.exp().permute(0, 2, 3, 1)[..., None]
    return y.reshape(batch, length, heads, head_dim)


class TrainingMixer(FalconH1Mixer):
    """transformers' Falcon-H1 mixer for whole sequences with one (B, C) group and no cache."""

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        projected = self.in_proj(hidden_states * self.ssm_in_multiplier) * self.mup_vector[0, 0]
        width, state, taps = self.intermediate_size, self.ssm_state_size, self.conv_kernel_size
        gate, xbc, dt = projected.split([width, width + 2 * state, self.num_heads], -1)
        padded = F.pad(xbc, (0, 0, taps - 1, 0))  # a causal depthwise convolution, tap by tap
        weight, length = self.conv1d.weight[:, 0], xbc.shape[1]
        conv = sum(weight[:, i] * padded[:, i : i + length] for i in range(taps))
        xbc = F.silu(conv + self.conv1d.bias).to(gate.dtype)
        value, b, c = xbc.split([width, state, state], -1)
        value = value.unflatten(-1, (self.num_heads, self.head_dim))
        dt = F.softplus(dt.float() + self.dt_bias)
        y = chunked_ssd(value, dt, -self.A_log.exp(), b, c, self.chunk_size)
        y = (y + value * self.D[:, None]).flatten(-2)
        return self.out_proj((y * F.silu(gate)).to(hidden_states.dtype))


def build_model(cfg: FalconH1Config, dropout: float = 0.0, device: str = "cpu") -> Model:
    """A freshly initialised model that trains through :class:`TrainingMixer`."""
    model = Model(cfg)
    for layer in model.model.layers:
        mixer = layer.mamba
        mixer.__class__ = TrainingMixer
        for module in (mixer, layer.self_attn.o_proj, layer.feed_forward):  # what joins the residual
            module.register_forward_hook(lambda m, _, out: F.dropout(out, dropout, m.training))
        with torch.no_grad():  # as in Mamba-2: time steps from 0.001 to 0.1, decay rates 1 to 16
            dt = torch.exp(torch.empty(mixer.num_heads).uniform_(math.log(1e-3), math.log(1e-1)))
            mixer.dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus
            mixer.A_log.uniform_(1, 16).log_()
    return model.to(device)


def logits_of(model: Model, ids: Tensor) -> Tensor:
    """Next-token logits of whole sequences, without masks and caches."""
    body = model.model
    x = body.embed_tokens(ids) * body.embedding_multiplier
    angles = body.rotary_emb(x, torch.arange(ids.shape[1], device=ids.device)[None])
    for layer in body.layers:
        x = layer(x, position_embeddings=angles)[0]
    return model.lm_head(body.final_layernorm(x)) * body.lm_head_multiplier


@torch.no_grad()
def evaluate(models: list[Model], stream: Tensor, length: int) -> dict[str, float]:
    """The last model's mean loss on consecutive windows, and how far the first model agrees with it.

    ``top1_agreement`` is how often both rank the same token first; ``expected_acceptance`` is the mean overlap of
    their distributions, the chance that speculative sampling at temperature 1 accepts a drafted token.
    """
    sums, count = torch.zeros(3, dtype=torch.float64), 0
    for part in stream[: len(stream) // (length + 1) * (length + 1)].view(-1, length + 1).split(32):
        with torch.autocast(stream.device.type, torch.bfloat16, enabled=stream.is_cuda):
            logits = [logits_of(model.eval(), part[:, :-1]).float() for model in models]
        first, last = logits[0].softmax(-1), logits[-1].softmax(-1)
        loss = F.cross_entropy(logits[-1].flatten(0, 1), part[:, 1:].flatten(), reduction="sum")
        same, overlap = (first.argmax(-1) == last.argmax(-1)).sum(), torch.minimum(first, last).sum()
        sums += torch.stack([loss, same, overlap]).double().cpu()
        count += part[:, 1:].numel()
    return dict(zip(("loss", "top1_agreement", "expected_acceptance"), (sums / count).tolist()))


def train(model: Model, data: list[Tensor], args: argparse.Namespace, steps: int, teacher: Model | None) -> Curve:
    """Train ``model`` in place; return the loss curve.

    Muon moves the layers' matrices and AdamW the rest, with one learning rate: a short warm-up, then a cosine to zero.
    The target is the next token or, given a teacher, the teacher's distribution over it.  Windows start anywhere but
    for a share that starts a line at column 0: from those a model learns to take its first token to be unindented.
    """
    stream, held_out, line_starts = data
    layers = model.model.layers
    if args.compile:
        torch._dynamo.config.recompile_limit = 32  # two models, training and evaluation shapes
        for layer in layers:
            layer.compile(dynamic=False)
    matrices = [p for p in layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if all(p is not m for m in matrices)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, weight_decay=args.weight_decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    offsets, running = torch.arange(args.length + 1, device=stream.device), torch.zeros((), device=stream.device)
    curve, started, aligned = Curve(), clock(), round(args.line_starts * args.batch)
    for step in range(1, steps + 1):
        rate = min(step / (0.03 * steps), 0.5 + 0.5 * math.cos(math.pi * step / steps))
        starts = torch.randint(len(stream) - args.length, (args.batch,), device=stream.device)
        starts[:aligned] = line_starts[starts[:aligned] % len(line_starts)]
        window = stream[starts[:, None] + offsets]
        with torch.autocast(stream.device.type, torch.bfloat16, enabled=stream.is_cuda):
            target = window[:, 1:].flatten()
            if teacher is not None:
                with torch.no_grad():
                    target = logits_of(teacher.eval(), window[:, :-1]).flatten(0, 1).float().softmax(-1)
            logits = logits_of(model.train(), window[:, :-1]).flatten(0, 1).float()
            loss = F.cross_entropy(logits, target)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = args.lr * rate
            optimizer.step()
            optimizer.zero_grad()
        running += loss.detach()
        every = max(steps // args.evaluations, 1)
        if step % every == 0 or step == steps:
            point = {"step": step, "train": running.item() / ((step - 1) % every + 1)}
            point |= {"held_out": evaluate([model], held_out, args.length)["loss"], "seconds": clock() - started}
            print("  ".join(f"{k} {v:.4g}" for k, v in point.items()), flush=True)
            curve.append(point)
            running.zero_()
    return curve


def save(model: Model, tokenizer: Tokenizer, folder: Path) -> float:
    """Write a Hugging Face directory in bfloat16; return how far the stock model's logits are from ours."""
    config, ours = model.config, build_model(model.config)
    ours.load_state_dict({k: v.to("cpu", torch.bfloat16) for k, v in model.state_dict().items()})
    special = dict(bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)
    ours.generation_config = GenerationConfig(do_sample=True, temperature=0.8, top_p=0.95, **special)
    ours.to(torch.bfloat16).save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    del written["time_step_limit"]  # (0, infinity), the default; not every JSON reader knows an infinity
    settings = dict(tokenizer_class="PreTrainedTokenizerFast", clean_up_tokenization_spaces=False)
    settings |= dict(bos_token=END, eos_token=END, pad_token=PAD, model_max_length=config.max_position_embeddings)
    for name, content in (("config", written), ("tokenizer_config", settings)):
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "NOTICE").write_text(NOTICE)
    stock = Model.from_pretrained(folder, dtype=torch.float32).eval()
    ours = build_model(config).eval()  # afresh: the conversion to bfloat16 also rounded the rotary frequencies
    ours.load_state_dict(stock.state_dict())
    ids = torch.randint(config.vocab_size, (2, 4 * config.mamba_chunk_size))
    with torch.no_grad():
        return (stock(ids).logits - logits_of(ours, ids)).abs().max().item()


def print_samples(folder: Path, tokens: int = 160) -> None:
    """Complete four prompts through transformers on the CPU, greedily and by sampling."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt in PROMPTS:
        inputs = tokenizer(prompt, return_tensors="pt")
        for settings in ({"do_sample": False}, {"do_sample": True}):
            torch.manual_seed(0)
            out = model.generate(**inputs, max_new_tokens=tokens, **settings)
            print(f"=== {settings}\n{tokenizer.decode(out[0], skip_special_tokens=True)}\n")


def plot(curves: dict[str, Curve], path: Path) -> None:
    """Draw the loss curves as a small SVG; the draft's training loss is against the main model's predictions."""
    import matplotlib

    matplotlib.rcParams.update({"backend": "svg", "svg.hashsalt": "hybridrt"})  # the same curve, the same file
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    for colour, (name, curve) in zip(("tab:blue", "tab:orange"), curves.items()):
        steps = [p["step"] for p in curve]
        axis.plot(steps, [p["held_out"] for p in curve], colour, label=f"{name}, held out")
        axis.plot(steps, [p["train"] for p in curve], colour, ls=":", label=f"{name}, training")
    axis.set(xlabel="step", ylabel="loss (nats per token)")
    axis.legend()
    figure.savefig(path, metadata={"Date": None})


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    either = parser.add_mutually_exclusive_group(required=True).add_argument
    either("--out", type=Path, help="folder for embedded/, embedded_draft/, log.json and the loss curve")
    either("--sample", type=Path, metavar="DIR", help="only print samples from a saved model")
    add("--source", type=Path, default=Path(sysconfig.get_path("stdlib")), help="folder of .py files")
    add("--steps", type=int, default=6000, help="steps of the main model (%(default)s)")
    add("--draft-steps", type=int, default=6000, help="steps of the draft (%(default)s)")
    add("--batch", type=int, default=32, help="windows per step (%(default)s)")
    add("--length", type=int, default=1024, help="tokens per window (%(default)s)")
    add("--lr", type=float, default=8e-3, help="peak learning rate (%(default)s)")
    add("--dropout", type=float, default=0.15, help="of the main model (%(default)s)")
    add("--weight-decay", type=float, default=0.2, help="of the matrices (%(default)s)")
    add("--evaluations", type=int, default=40, help="points of each loss curve (%(default)s)")
    add("--init", type=Path, metavar="DIR", help="continue from an earlier --out (its models and tokenizer)")
    add("--line-starts", type=float, default=0.5, help="share of windows starting at column 0 (%(default)s)")
    add("--seed", type=int, default=0, help="(%(default)s)")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(%(default)s)")
    add("--compile", action="store_true", help="torch.compile the layers")
    add("--small", action="store_true", help="tiny models and little text, to try the script")
    args = parser.parse_args()
    if args.small:
        args.batch, args.length = 4, 128
    return args


def main() -> None:
    """Run the steps in the module's docstring."""
    args = parse_args()
    if args.sample:
        return print_samples(args.sample)
    torch.manual_seed(args.seed)
    texts, held_out_texts = read_sources(args.source, 60 if args.small else None)
    earlier = args.init and str(args.init / "embedded/tokenizer.json")
    tokenizer = Tokenizer.from_file(earlier) if earlier else train_tokenizer(texts, 512 if args.small else 4096)
    data = [to_stream(t, tokenizer, args.device) for t in (texts, held_out_texts)]
    line_ends = [i for token, i in tokenizer.get_vocab().items() if token == END or set(token) == {"Ċ"}]  # Ċ: newline
    ends = torch.isin(data[0][: -args.length - 1], torch.tensor(line_ends, device=args.device))
    data.append(ends.nonzero().flatten() + 1)  # where the training tokens begin a line at column 0
    log: dict[str, Any] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "CPU",
        "arguments": {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()},
        "files": [len(texts), len(held_out_texts)],
        "tokens": [len(stream) for stream in data[:2]],
        "held_out_bytes_per_token": sum(len(t.encode()) for t in held_out_texts) / len(data[1]),
    }
    print(json.dumps(log, indent=1), flush=True)
    trained: dict[str, Model] = {}
    curves: dict[str, Curve] = log.setdefault("curves", {})
    for name, steps, dropout in (("embedded", args.steps, args.dropout), ("embedded_draft", args.draft_steps, 0.0)):
        config = model_config(tokenizer, SHAPES["small" if args.small else name])
        trained[name] = model = build_model(config, dropout, args.device)
        if args.init:
            model.load_state_dict(Model.from_pretrained(args.init / name).state_dict())
        print(name, sum(p.numel() for p in model.parameters()), "parameters", flush=True)
        curves[name] = train(model, data, args, steps, trained["embedded"] if len(trained) > 1 else None)
        log[name] = evaluate([*trained.values()], data[1], args.length)
        log[name]["logit_difference"] = save(model, tokenizer, args.out / name)
        print(name, log[name], flush=True)
    (args.out / "log.json").write_text(json.dumps(log, indent=1) + "\n")
    plot(curves, args.out / "embedded-loss.svg")


if __name__ == "__main__":
    main()
