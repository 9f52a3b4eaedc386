"""Small builders of real values, shared by the tests. Every argument has a default; nothing here replaces our own classes."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from socket import AF_INET, IPPROTO_TCP, SO_REUSEADDR, SOCK_STREAM, SOL_SOCKET, socket

import uvicorn
from starlette.types import ASGIApp
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pd_serve.addresses import http_address
from pd_serve.ids import Incarnation, PeerId, WorkerId
from pd_serve.kv.layout import KVDtype, KVLayout
from pd_serve.protocol.link import BlockCounts, Load, PeerInfo, PeerState, Role, Welcome
from pd_serve.protocol.sampling import SamplingParams
from pd_serve.protocol.server import ServerLimits, server_config
from pd_serve.wire import PROTOCOL_VERSION
from tests.patience import Waiting

_STEP_S = 0.002
EOS_ID = 0
VOCAB_SIZE = 260
"""Of `write_tokenizer`: three special tokens, a word token, and the 256 bytes."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def peer_id(name: str = "decode-0", incarnation: int = 1) -> PeerId:
    return PeerId(WorkerId(name), Incarnation(incarnation))


def kv_layout(num_blocks: int = 256, block_size: int = 16, num_layers: int = 2) -> KVLayout:
    return KVLayout(num_layers=num_layers, num_kv_heads=2, head_dim=8, block_size=block_size, num_blocks=num_blocks, dtype=KVDtype.FLOAT32)


def peer_info(
    peer: PeerId | None = None, role: Role = Role.DECODE, layout: KVLayout | None = None, fingerprint: str = "model-a"
) -> PeerInfo:
    return PeerInfo(
        peer=peer or peer_id(),
        role=role,
        protocol_version=PROTOCOL_VERSION,
        model_fingerprint=fingerprint,
        layout=layout or kv_layout(),
        transport="loopback",
        transport_metadata=(b"",),
    )


def welcome(info: PeerInfo | None = None, max_model_len: int = 2048, vocab_size: int = VOCAB_SIZE) -> Welcome:
    return Welcome(
        info=info or peer_info(),
        model_name="tiny",
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        eos_token_ids=(EOS_ID,),
        pid=1,
        rank_pids=(2,),
    )


def block_counts(total: int = 256, free: int | None = None, cached: int = 0) -> BlockCounts:
    return BlockCounts(total=total, free=total if free is None else free, cached=cached, leased=0, quarantined=0)


def load(role: Role = Role.DECODE, blocks: BlockCounts | None = None, prefill_queue_tokens: int = 0, draining: bool = False) -> Load:
    return Load(
        seq=0,
        role=role,
        draining=draining,
        blocks=blocks or block_counts(),
        leases=0,
        running=0,
        waiting=0,
        prefill_queue_tokens=prefill_queue_tokens,
        decode_context_tokens=0,
    )


def joined(peer: PeerId) -> PeerState:
    return PeerState(peer=peer, joined=True, lane="loopback", one_sided=True, bandwidth=1e9, detail="")


def sampling(max_tokens: int = 4) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0)


def write_tokenizer(folder: Path, chat_template: str | None = CHAT_TEMPLATE, special_tokens: tuple[str, ...] = ()) -> Path:
    """A byte-level tokenizer with a chat template: id 0 ends, 1 and 2 are special, 3 is ` token`, 4 + b is the byte b.

    `special_tokens`: more of them, with ids from VOCAB_SIZE on.
    """
    alphabet = _byte_alphabet()
    vocab = {"<|im_end|>": 0, "<|im_start|>": 1, "<pad>": 2, "\u0120token": 3}
    vocab.update({alphabet[value]: 4 + value for value in range(256)})
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|im_end|>", "<|im_start|>", "<pad>", *special_tokens])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config: dict[str, object] = {"eos_token": "<|im_end|>", "bos_token": {"content": "<|im_start|>"}}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": 2048}))
    return folder


def byte_ids(text: str) -> tuple[int, ...]:
    """Token ids of a text under `write_tokenizer`."""
    return tuple(4 + value for value in text.encode())


def _byte_alphabet() -> list[str]:
    """Character that stands for each byte in a byte-level vocabulary."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return [chr(value) if value in kept else chr(next(others)) for value in range(256)]


@asynccontextmanager
async def serving(
    app: ASGIApp,
    listener: socket | None = None,
    lifespan: str = "on",
    limits: ServerLimits | None = None,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[str]:
    """Serve an ASGI app on a real socket within this event loop; yields its address."""
    listener = listener or loopback_listener()
    config = server_config(
        app,
        limits or ServerLimits(1024, 32 * 1024, 60.0, 30.0),
        tls,
        ws="websockets-sansio",
        lifespan="on" if lifespan == "on" else "off",
        timeout_graceful_shutdown=1,
    )
    server = _Server(config)
    task = asyncio.create_task(server.serve([listener]))
    try:
        while not server.started:
            if task.done():
                await task
                raise AssertionError("the server did not start")
            await asyncio.sleep(_STEP_S)
        yield http_address("127.0.0.1", listener.getsockname()[1], tls is not None)
    finally:
        server.end()
        await task
        listener.close()


def loopback_listener(port: int = 0) -> socket:
    listener = socket(AF_INET, SOCK_STREAM, IPPROTO_TCP)  # named: asyncio sets TCP_NODELAY only where the protocol is
    listener.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    return listener


class _Server(uvicorn.Server):
    """Leaves the test runner's signals alone, and is ended by end(): uvicorn itself looks every tenth of a second whether it shall."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._is_over = asyncio.Event()

    def end(self) -> None:
        self._is_over.set()

    async def serve(self, sockets: list[socket] | None = None) -> None:
        await self._serve(sockets)

    async def main_loop(self) -> None:
        await self.on_tick(0)
        await self._is_over.wait()

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """As uvicorn's, in steps of milliseconds."""
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        state = self.server_state
        for connection in list(state.connections):
            connection.shutdown()
        waiting = Waiting(float(self.config.timeout_graceful_shutdown or 0), _STEP_S)
        while (state.connections or state.tasks) and not waiting.is_over():  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(_STEP_S)
        for task in state.tasks:
            task.cancel()
        await self.lifespan.shutdown()
