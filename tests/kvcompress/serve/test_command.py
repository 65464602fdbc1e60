"""The command: what is wrong is one line before anything is loaded; what is right is served."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys

import httpx
import pytest

from kvcompress.command_line import exit_code
from kvcompress.serve import command
from lmms_eval_plugins import serve
from tests.support.families import FAMILIES

RIGHT = ["org/model", "snapkv", "0.2"]


def refused(capsys, *words) -> str:
    assert exit_code(command.main, list(words)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("error: ")


@pytest.fixture
def nothing_is_loaded(monkeypatch):
    monkeypatch.setattr(command, "load", lambda *given: pytest.fail("something is loaded"))


@pytest.mark.usefixtures("nothing_is_loaded")
def test_what_is_wrong_is_one_line_before_anything_is_loaded(capsys, monkeypatch):
    for words, said in [
        (["org/model", "snapvk", "0.2"], "there is no method 'snapvk' (did you mean 'snapkv'?)"),
        ([*RIGHT, "windowsize=4"], "method 'snapkv' has no option 'windowsize' (did you mean 'window_size'?)"),
        ([*RIGHT, "protect_text=Hello"], "protect_text= is text of one prompt"),
        (["org/model", "full", "0.2"], "method 'full' compresses nothing"),
        ([*RIGHT, "cache_implementation=quantized"], "do not go with cache_implementation='quantized'"),
        ([*RIGHT, "--port", "70000"], "argument --port"),
        (
            ["org/model", "kvzip", "0.2", "--prefix-gb", "1"],
            "--prefix-gb: no two prompts share anything: method 'kvzip'",
        ),
        ([*RIGHT, "--host", "256.0.0.1"], "--host 256.0.0.1 --port 8000: "),
    ]:
        assert said in refused(capsys, *words)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        assert f"--port {port}: " in refused(capsys, *RIGHT, "--port", port)
    monkeypatch.setattr(command, "PACKAGES", ("starlette", "nonesuch"))
    message = "serve needs packages that are not here (nonesuch): pip install 'kvcompress[serve]'"
    assert refused(capsys, *RIGHT) == message


def test_a_checkpoint_that_cannot_chat_is_one_line(capsys, tmp_path):
    FAMILIES["qwen2"].build().save_pretrained(tmp_path)
    capsys.readouterr()
    assert "has no chat template" in refused(capsys, str(tmp_path), "snapkv", "0.2", "--port", "0")
    assert "cannot be loaded" in refused(capsys, str(tmp_path / "none"), "snapkv", "0.2", "--port", "0")


def test_only_the_loopback_is_bound_unless_asked():
    given = command.parser().parse_intermixed_args(RIGHT)
    with command.listening(given.host, 0) as place:
        assert place.getsockname()[0] == "127.0.0.1"
        with socket.socket() as client:  # nothing listens before the model is there
            assert client.connect_ex(place.getsockname()) != 0


def test_an_answer_is_sent_at_once():
    async def delays(place) -> bool:
        """Return whether a connection waits for more to send (Nagle's algorithm)."""
        accepted = asyncio.get_running_loop().create_future()
        async with await asyncio.start_server(lambda _, writer: accepted.set_result(writer), sock=place):
            _, client = await asyncio.open_connection(*place.getsockname())
            writer = await accepted
            delays = not writer.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            writer.close()
            client.close()
            return delays

    assert not asyncio.run(delays(command.listening("127.0.0.1", 0)))


@pytest.mark.slow
def test_the_command_serves_the_bundled_model_until_it_is_ended():
    words = ["tiny", "streamingllm", "0.5", "--port", "0", "--max-tokens", "4"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", command.API_KEY: "secret"}
    script = f"import sys; from {serve.__name__} import main; sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", script, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        line = process.stdout.readline()
        url = re.fullmatch(r"serving tiny with streamingllm at (http://127\.0\.0\.1:\d+/v1)\n", line)[1]
        body = {"model": "tiny", "messages": [{"role": "user", "content": "what is on the sign"}]}
        assert httpx.post(f"{url}/chat/completions", json=body).status_code == 401
        key = {"Authorization": "Bearer secret"}
        answer = httpx.post(f"{url}/chat/completions", json=body, headers=key).json()
        assert 0 < answer["usage"]["completion_tokens"] <= 4
        about = httpx.get(f"{url}/models", headers=key).json()["data"][0]
        assert (about["id"], about["method"], about["ratio"]) == ("tiny", "streamingllm", 0.5)
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert errors.splitlines()[-1] == "error: ended by SIGTERM"
    assert "Traceback" not in errors
