"""`kvcompress serve`: answer OpenAI's chat completions with a compressed cache, many requests at a time."""

import argparse
import os
import socket
import sys
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..bench.flags import add_flags
from ..command_line import Parser, key_values
from ..errors import KVCompressError, loading
from ..flag_types import fraction, label, positive, whole

if TYPE_CHECKING:
    from .app import Server

PACKAGES = ("starlette", "uvicorn", "prometheus_client", "PIL")
API_KEY = "KVCOMPRESS_API_KEY"  # environment variable, as others see a command's flags
OF_A_PROMPT = ("protect", "fair", "scope", "context_tokens")  # options that name tokens which not every prompt has
GRACE_S = 5  # seconds in which answers may end after the server is asked to end


def parser() -> argparse.ArgumentParser:
    this = Parser("serve", description=__doc__)
    add = this.add_argument
    add("model", type=label, help="hub id or local path")
    add("method", type=label)
    add("ratio", type=fraction, help="fraction of each prompt's entries that is kept; 1 for `full`")
    add("options", nargs="*", type=label, metavar="OPTION=VALUE", help="of the method or the engine")
    add("--name", type=label, help="the model's name in requests (default: MODEL)")
    add("--host", type=label, default="127.0.0.1", help="address to listen at (127.0.0.1: this machine alone)")
    add("--port", type=whole(0, 65535), default=8000, help="0: any that is free (8000)")
    add("--api-key", type=label, help=f"what requests must bring (default: the variable {API_KEY}; none: nothing)")
    add("--slots", type=whole(1), default=16, help="the most requests that decode together (16)")
    add("--kv-gb", type=positive, help="gigabytes for all slots (default: what they need)")
    add("--queue", type=whole(1), default=256, help="the most unanswered requests; further ones get status 429 (256)")
    add("--max-tokens", type=whole(1), default=1024, help="the most new tokens of an answer, and the default (1024)")
    add("--prefill-tokens", type=whole(1), help="the most prompt tokens between two steps (default: a whole prompt)")
    add("--prefix-gb", type=positive, help="gigabytes for prompts' prefixes, shared by prompts that begin alike")
    add("--dtype", choices=["auto", "float32", "bfloat16", "float16"], default="auto", help="of the model (auto)")
    add_flags(this, "--device")
    return this


def main(arguments: list[str]) -> None:
    """Run the command. Raises KVCompressError, if possible before anything is loaded."""
    serve(parser().parse_intermixed_args(arguments))


def serve(flags: argparse.Namespace) -> None:
    """Serve until the process is asked to end."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if missing:
        raise KVCompressError(f"serve needs packages that are not here ({missing[0]}): pip install 'kvcompress[serve]'")
    from ..inflight.loop import check_storage
    from ..policy.make import make_policy

    options = key_values(flags.options, ("method", "ratio"))
    policy = make_policy(flags.method, flags.ratio, **options)
    check_storage(policy.engine.cache_implementation)
    if policy.passages:
        raise KVCompressError("protect_text= is text of one prompt, and a server answers many")
    with listening(flags.host, flags.port) as place:
        server = load(flags, options)
        from .app import Runner

        host, port = place.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        print(f"serving {server.name} with {flags.method} at http://{host}:{port}/v1", flush=True)
        if server.api_key is None and not place.getsockname()[0].startswith(("127.", "::1")):
            print("warning: whoever reaches this address may use it; --api-key asks for a key", file=sys.stderr)
        Runner(server, GRACE_S).run(sockets=[place])


def listening(host: str, port: int) -> socket.socket:
    """Return a socket that is bound but does not listen yet. Raises KVCompressError if the address cannot be had."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        # Only of a socket that names TCP does asyncio set TCP_NODELAY; without it an answer waits 40 ms.
        place = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        place.bind(address)
    except (OSError, UnicodeError) as error:
        raise KVCompressError(f"--host {host} --port {port}: {error}") from None
    return place


def load(flags: argparse.Namespace, options: dict[str, str]) -> "Server":
    """Load the model and answer a prompt with it. Raises KVCompressError if it cannot be served with these settings."""
    from transformers import AutoConfig, AutoProcessor

    from .. import PrefixCache, compress
    from ..calibration.command import load as load_model
    from .app import Server
    from .chat import Message, Prompts
    from .worker import Worker

    with loading(flags.model):
        config = AutoConfig.from_pretrained(flags.model)
        processor = AutoProcessor.from_pretrained(flags.model)
    if not getattr(processor, "chat_template", None):
        raise KVCompressError(f"{flags.model} has no chat template: it cannot answer chats")
    model, tokenizer = load_model(flags.model, config, flags.dtype, flags.device)
    if model.generation_config.eos_token_id is None:
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    prefixes = None if flags.prefix_gb is None else PrefixCache(gb=flags.prefix_gb)
    engine = {"max_new_tokens": flags.max_tokens, "prefix_cache": prefixes}
    session = partial(compress, model, flags.method, flags.ratio, **engine, **options)
    settings = {"slots": flags.slots, "kv_gb": flags.kv_gb, "prefill_tokens": flags.prefill_tokens}
    prompts = Prompts(model, processor, flags.max_tokens)
    # What models cannot do in flight is found with a first prompt, which is short and shows no image.
    hello = prompts.inputs([Message(role="user", content="Hello")])
    of_all = {name: value for name, value in options.items() if name not in OF_A_PROMPT}
    with compress(model, flags.method, flags.ratio, **engine, **of_all) as entered:
        for answer in entered.generate_many([hello], **settings, min_new_tokens=2, max_new_tokens=2):
            if answer.error is not None:
                raise answer.error
    about: dict[str, Any] = {"method": flags.method, "ratio": flags.ratio, "options": options}
    api_key = flags.api_key or os.environ.get(API_KEY) or None
    return Server(flags.name or flags.model, about, Worker(session, settings), prompts, flags.queue, api_key)
