"""Workers over NIXL and TCP: one LLM computes prompts, another one generates."""

from collections.abc import Sequence

from hybridrt.distributed.transfer.channel import Listener, SocketChannel
from hybridrt.distributed.transfer.decode import DecodeWorker
from hybridrt.distributed.transfer.prefill import PrefillWorker
from hybridrt.distributed.transfer.ranks import open_ranks
from hybridrt.distributed.transfer.side import WorkerSide
from hybridrt.engine.llm import LLM


def prefill_worker(llm: LLM, host: str = "127.0.0.1", port: int = 0) -> PrefillWorker:
    """A prefill worker that listens at `host`:`port` (0: a free port, which `worker.port` tells). `serve` runs it.

    Raises:
        ConfigError: the LLM was built without transfer_bytes.
        ProviderNotInstalledError: NIXL is not installed or cannot be loaded; says why.
    """
    side = WorkerSide.of(llm)
    return PrefillWorker(side, open_ranks(side, serve=True), Listener(host, port))


def decode_worker(llm: LLM, prefill: Sequence[tuple[str, int]], *, compute_here: bool = True) -> DecodeWorker:
    """Lets the prefill workers at these addresses compute the prompts of `llm`, which is then used as ever.

    Args:
        compute_here: prompts that no prefill worker can compute are computed by `llm` itself; otherwise they fail.

    Raises:
        HandshakeError: a worker runs something else; says what.
        TransferError: a worker does not answer (PeerGoneError), or its number of ranks does not fit.
        ConfigError, ProviderNotInstalledError: as for `prefill_worker`.
    """
    side = WorkerSide.of(llm)
    worker = DecodeWorker(side, open_ranks(side, serve=False), compute_here=compute_here)
    for host, port in prefill:
        worker.connect(SocketChannel.connect(host, port))
    return worker
