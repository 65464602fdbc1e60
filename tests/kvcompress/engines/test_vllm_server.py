"""`vllm serve` with the plugin answers an OpenAI request as transformers does. Run by scripts/test_engines.sh."""

import base64
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from transformers import AutoProcessor

import kvcompress
from tests.kvcompress.engines import tiny_qwen

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow

VLLM = str(Path(sys.executable).with_name("vllm"))
QUIET = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1",
}  # fmt: skip
SIZE = 32  # tokens of a block, where they are evicted
START = 900  # seconds that a server may take to start, on a machine that is busy


@pytest.fixture(scope="module")
def pruning(checkpoint, tmp_path_factory) -> Iterator[str]:
    """The address of a server that prunes."""
    with served(checkpoint, tmp_path_factory.mktemp("log"), "divprune", 0.25) as address:
        yield address


@pytest.fixture(scope="module")
def evicting(checkpoint, tmp_path_factory) -> Iterator[str]:
    """The address of a server that evicts."""
    with served(checkpoint, tmp_path_factory.mktemp("log"), "knorm", 0.5, "--block-size", str(SIZE)) as address:
        yield address


@contextmanager
def served(checkpoint: str, folder: Path, method: str, ratio: float, *more: str) -> Iterator[str]:
    """Serve; yields the address."""
    port = free_port()
    environment = {**os.environ, **QUIET, "KVCOMPRESS_METHOD": method, "KVCOMPRESS_RATIO": str(ratio)}
    flags = ["--dtype", "float32", "--enforce-eager", "--max-model-len", "1024", "--served-model-name", "tiny"]
    flags += ["--distributed-executor-backend", "uni"]  # no third process to start
    log = folder / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [VLLM, "serve", checkpoint, "--host", "127.0.0.1", "--port", str(port), *flags, *more],
            env=environment, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
        address = f"http://127.0.0.1:{port}"
        try:
            wait_for(address, process, log)
            yield address
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def wait_for(address: str, process: subprocess.Popen, log: Path) -> None:
    end = time.monotonic() + START
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5)
            return
        except OSError:
            time.sleep(1)
    pytest.fail(f"the server did not start: {log.read_text()[-4000:]}")


def ask(url: str, asked: dict) -> dict:
    body = urllib.request.Request(url, json.dumps(asked).encode(), {"Content-Type": "application/json"})
    return json.load(urllib.request.urlopen(body, timeout=120))


def test_answers_of_a_server_that_evicts_are_those_without_the_blocks(evicting, checkpoint, model):
    processor = AutoProcessor.from_pretrained(checkpoint)
    for prompt in tiny_qwen.long_prompts()[:8:2]:  # of text
        asked = {"model": "tiny", "prompt": prompt["prompt"], "max_tokens": tiny_qwen.ANSWER, "temperature": 0}
        reply = ask(f"{evicting}/v1/completions", {**asked, "ignore_eos": True, "return_token_ids": True})
        inputs = tiny_qwen.inputs_of(processor, prompt)
        wanted, leave = tiny_qwen.answer_in_blocks(model, inputs, SIZE, {"method": "knorm", "ratio": 0.5})
        assert leave
        assert reply["choices"][0]["token_ids"] == wanted


def test_a_chat_with_a_picture_is_answered_as_by_transformers(pruning, checkpoint, model):
    picture = tiny_qwen.prompts()[0]["multi_modal_data"]["image"][0]
    encoded = io.BytesIO()
    picture.save(encoded, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(encoded.getvalue()).decode()}"
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What?"}]
    asked = {
        "model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": tiny_qwen.ANSWER,
        "temperature": 0, "ignore_eos": True,
    }  # fmt: skip
    reply = ask(f"{pruning}/v1/chat/completions", asked)

    processor = AutoProcessor.from_pretrained(checkpoint)
    text = "[user] <|vision_start|><|image_pad|><|vision_end|>What?[assistant] "
    inputs = tiny_qwen.inputs_of(processor, {"prompt": text, "multi_modal_data": {"image": [picture]}})
    with kvcompress.compress(model, "divprune", ratio=0.25) as session:
        wanted = tiny_qwen.answer_of(model, inputs)
        kept = len(session.cache.kept_indices(0)[0][0]) - (tiny_qwen.ANSWER - 1)  # the last token is not cached
    assert reply["choices"][0]["message"]["content"] == processor.tokenizer.decode(wanted)
    assert reply["usage"]["prompt_tokens"] == kept < inputs["input_ids"].shape[1]


def test_bad_input_is_one_line_and_nothing_starts(checkpoint):
    environment = {**os.environ, **QUIET, "KVCOMPRESS_METHOD": "snapkv", "KVCOMPRESS_RATIO": "0.25"}
    command = [VLLM, "serve", checkpoint, "--host", "127.0.0.1", "--port", str(free_port())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=START)
    assert done.returncode
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: method 'snapkv' cannot evict in a serving engine: it reads queries")
    assert "Traceback" not in done.stderr
