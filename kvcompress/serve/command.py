"""`kvcompress serve`: answer OpenAI's chat completions with a compressed cache, many requests at a time."""

import argparse
import copy
import os
import socket
import sys
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from ..bench.flags import add_flags
from ..command_line import Parser, key_values
from ..errors import KVCompressError, loading, one_line
from ..flag_types import fraction, label, positive, whole

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from ..hooks.prefix_cache import PrefixCache
    from .app import Server
    from .paged_worker import PagedWorker
    from .worker import Worker

PACKAGES = ("starlette", "uvicorn", "prometheus_client", "PIL")
API_KEY = "KVCOMPRESS_API_KEY"  # environment variable, as others see a command's flags
OF_A_PROMPT = ("protect", "fair", "scope", "context_tokens")  # options that name tokens which not every prompt has
LOOPBACK = ("localhost", "127.0.0.1", "::1")  # names of this machine
GRACE_S = 5  # seconds in which answers may end after the server is asked to end
SLOTS = 16
PAGE = 16  # tokens
STEP = 1024  # tokens of a step in pages
# What a model's generation config may set in pages, whatever it is. transformers' continuous batching heeds the rest
# otherwise than `generate`, or not at all.
FITS_PAGES = {
    *("bos_token_id", "eos_token_id", "pad_token_id", "max_length", "max_new_tokens", "transformers_version"),
    *("do_sample", "temperature", "top_p", "top_k", "min_p", "typical_p", "suppress_tokens", "_from_model_config"),
}


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
    add("--slots", type=whole(1), help=f"the most requests that decode together ({SLOTS})")
    add("--kv-gb", type=positive, help="gigabytes for all slots (default: what they need)")
    add("--pages-gb", type=positive, help="text alone, in transformers' continuous batching: gigabytes of its pages")
    add("--queue", type=whole(1), default=256, help="the most unanswered requests; further ones get status 429 (256)")
    add("--max-tokens", type=whole(1), default=1024, help="the most new tokens of an answer, and the default (1024)")
    add("--prefill-tokens", type=whole(1), help=f"the most prompt tokens between two steps (a prompt; in pages {STEP})")
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
    from ..hooks.resumed_prompt import why_never
    from ..inflight.loop import check_storage
    from ..policy.conflicts import PAGES, check_conflicts
    from ..policy.make import make_policy

    options = key_values(flags.options, ("method", "ratio"))
    policy = make_policy(flags.method, flags.ratio, **options)
    if flags.pages_gb is None:
        check_storage(policy.engine.cache_implementation)
    else:
        check_conflicts(policy, PAGES)
        for flag in ("slots", "kv_gb"):
            if getattr(flags, flag) is not None:
                name = flag.replace("_", "-")
                raise KVCompressError(f"--pages-gb does not go with --{name}: transformers fills its pages as it can")
    if flags.prefix_gb is not None and policy.engine.scope != "context-first" and (reason := why_never(policy)):
        raise KVCompressError(f"--prefix-gb: no two prompts share anything: {reason}")
    if policy.passages:
        raise KVCompressError("protect_text= is text of one prompt, and a server answers many")
    with listening(flags.host, flags.port) as place:
        server = load(flags, options)
        from .app import Runner

        host, port = place.getsockname()[:2]
        host = f"[{host}]" if ":" in host else host
        is_local = place.getsockname()[0].startswith(("127.", "::1"))
        if is_local and server.api_key is None:  # no page knows a key
            server.hosts = (*LOOPBACK, flags.host.lower(), place.getsockname()[0])
        print(f"serving {server.name} with {flags.method} at http://{host}:{port}/v1", flush=True)
        if server.api_key is None and not is_local:
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

    from .. import PrefixCache
    from ..calibration.command import load as load_model
    from .app import Server
    from .chat import Message, Prompts

    with loading(flags.model):
        config = AutoConfig.from_pretrained(flags.model)
        processor = AutoProcessor.from_pretrained(flags.model)
    if not getattr(processor, "chat_template", None):
        raise KVCompressError(f"{flags.model} has no chat template: it cannot answer chats")
    model, tokenizer = load_model(flags.model, config, flags.dtype, flags.device)
    if model.generation_config.eos_token_id is None:
        model.generation_config.eos_token_id = tokenizer.eos_token_id
    prefixes = None if flags.prefix_gb is None else PrefixCache(gb=flags.prefix_gb)
    prompts = Prompts(model, processor, flags.max_tokens)
    # What models cannot do is found with a first prompt, which is short and shows no image.
    hello = prompts.inputs([Message(role="user", content="Hello")])
    worker = (in_slots if flags.pages_gb is None else in_pages)(model, flags, options, prefixes, hello)
    about: dict[str, Any] = {"method": flags.method, "ratio": flags.ratio, "options": options}
    api_key = flags.api_key or os.environ.get(API_KEY) or None
    return Server(flags.name or flags.model, about, worker, prompts, flags.queue, api_key)


def in_slots(
    model: "PreTrainedModel",
    flags: argparse.Namespace,
    options: dict[str, str],
    prefixes: "PrefixCache | None",
    hello: Mapping[str, "torch.Tensor"],
) -> "Worker":
    """Return a worker whose requests decode in slots, once it has answered `hello`. Raises KVCompressError if the model
    cannot be served with these settings."""
    from .. import compress
    from .worker import Worker

    engine = {"max_new_tokens": flags.max_tokens, "prefix_cache": prefixes}
    session = partial(compress, model, flags.method, flags.ratio, **engine, **options)
    settings = {"slots": flags.slots or SLOTS, "kv_gb": flags.kv_gb, "prefill_tokens": flags.prefill_tokens}
    of_all = {name: value for name, value in options.items() if name not in OF_A_PROMPT}
    with compress(model, flags.method, flags.ratio, **engine, **of_all) as entered:
        for answer in entered.generate_many([hello], **settings, min_new_tokens=2, max_new_tokens=2):
            if answer.error is not None:
                raise answer.error
    return Worker(session, settings)


def in_pages(
    model: "PreTrainedModel",
    flags: argparse.Namespace,
    options: dict[str, str],
    prefixes: "PrefixCache | None",
    hello: Mapping[str, "torch.Tensor"],
) -> "PagedWorker":
    """Return a worker on transformers' continuous batching, as `in_slots` does."""
    from transformers import ContinuousBatchingConfig

    from ..bench.throughput import entry_bytes
    from ..paged import compress
    from .paged_worker import PagedWorker
    from .worker import Job

    settings = model.generation_config
    if other := settings.to_diff_dict().keys() - FITS_PAGES:
        raise KVCompressError(f"answers in pages (--pages-gb) cannot heed the model's {min(other)}: leave the flag out")
    page_bytes = PAGE * entry_bytes(model)
    number = int(flags.pages_gb * 2**30 // page_bytes)
    if number == 0:
        raise KVCompressError(f"--pages-gb {flags.pages_gb:g} has no room for a page of {page_bytes} bytes")
    step = flags.prefill_tokens or STEP
    pages = ContinuousBatchingConfig(
        page_size=PAGE, num_blocks=number, max_batch_tokens=step, auto_switch_to_flash=False
    )
    greedy = copy.deepcopy(settings)
    greedy.update(do_sample=False, max_new_tokens=flags.max_tokens)
    session = partial(compress, model, flags.method, flags.ratio, prefix_cache=prefixes, **options)
    trial, answers = PagedWorker(session, greedy, pages), SimpleQueue()
    first = Job(hello, {"max_new_tokens": flags.max_tokens}, None, lambda tokens: len(tokens) > 1, answers.put)
    with loading(flags.model):
        trial.start()
    try:
        trial.submit(first)
        if answers.get() is None:
            raise KVCompressError(f"{flags.model} cannot be served in pages: {one_line(first.error)}")
    finally:
        trial.stop()
    return PagedWorker(session, greedy, pages)
