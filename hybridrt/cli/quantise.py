"""`hybridrt quantize`: a quantised copy of a plain checkpoint."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from hybridrt.cli.options import read_text

SCHEMES = ("fp8", "int4", "nvfp4")


def quantize(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Checkpoint directory or hub name.")],
    out: Annotated[str, typer.Argument(metavar="OUT", help="The new directory.")],
    scheme: Annotated[str, typer.Option(metavar="|".join(SCHEMES), help="How matrices are stored.")],
    ignore: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help='Leave this module plain: its name, or "re:" and an expression.'),
    ] = None,
    text: Annotated[
        str | None, typer.Option(metavar="FILE", help="Print the perplexity on this text before and after.")
    ] = None,
    device: Annotated[str, typer.Option(metavar="cpu|cuda|cuda:N", help="Where to run for --text.")] = "auto",
) -> None:
    """Write a quantised copy of a plain checkpoint.

    It has the form of compressed-tensors. fp8: blocks of 128 x 128. int4: groups of 128 inputs. nvfp4: groups of 16.
    transformers, vLLM and hybridrt read it. Embeddings, heads, routers, convolutions and norms stay plain. Memory holds
    one tensor at a time. OUT appears once it is complete.
    """
    from hybridrt.base.errors import ConfigError
    from hybridrt.runtime.load.quantise import write_quantised

    if scheme not in SCHEMES:
        raise ConfigError(f"scheme is {scheme!r}; it must be one of {', '.join(SCHEMES)}")
    words = None if text is None else read_text("--text", text)
    with _clean_end():
        made = write_quantised(model, Path(out), scheme, ignore or (), progress=True)
    share = made.bytes / made.source_bytes
    typer.echo(
        f"{made.path}: {made.modules} matrices in {scheme}, {made.plain} plain; {made.bytes:,} bytes, {share:.2f} of "
        f"{made.source_bytes:,}"
    )
    if words is not None:
        before, after = (_perplexity(name, words, device) for name in (model, out))
        typer.echo(f"perplexity {before:.4f} before, {after:.4f} after ({after / before - 1:+.2%})")


@contextmanager
def _clean_end() -> Iterator[None]:
    """SIGTERM, and SIGHUP of a terminal that is gone, end the process as an exception: what is half written is
    removed, as after Ctrl-C. SIGHUP stays ignored if it is (nohup)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ends = [signal.SIGTERM] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGTERM, signal.SIGHUP]
    before = {each: signal.signal(each, lambda number, _: sys.exit(128 + number)) for each in ends}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _perplexity(model: str, text: str, device: str) -> float:
    from hybridrt.base.errors import ConfigError
    from hybridrt.bench.perplexity import perplexity
    from hybridrt.engine.api.llm import LLM

    with LLM(model, device=device, prefix_cache=False) as llm:
        if llm.tokenizer is None:
            raise ConfigError(f"{model} has no tokenizer, which --text needs")
        return perplexity(llm, llm.tokenizer.encode(text))
