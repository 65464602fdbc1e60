"""A GPU, a model or a network that is not there is named, with what to do."""

import gc
import http.server
import os
import re
import socket
import socketserver
import threading

import pytest
import torch

from kvcompress import device
from lmms_eval_plugins import evaluate
from lmms_eval_plugins.cells import machine
from lmms_eval_plugins.cells.errors import EvaluationFailed
from lmms_eval_plugins.evaluate import parse
from lmms_eval_plugins.model.batch_size import free_memory
from tests.support.evaluation import FOUR, error_line

pytestmark = pytest.mark.usefixtures("clean_process")


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_named_gpu_that_is_not_there_ends_with_1(capsys):
    assert evaluate.main([*FOUR, "device=cuda:0"]) == 1
    assert re.match(r"error: device 'cuda:0' .* no CUDA GPU; device=cpu", error_line(capsys))


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(EvaluationFailed, match=r"NUM_PROCESSES=3, but torch .* sees 2 CUDA GPUs"):
        machine.check_device(None, 3)
    machine.check_device("cpu", 3)
    machine.check_device("cuda:1", 2)
    machine.check_device("cuda", 2)
    with pytest.raises(EvaluationFailed, match=r"'cuda:2' was requested, but torch .* sees 2 CUDA GPUs"):
        machine.check_device("cuda:2", 1)


def test_apples_gpu_is_waited_for_and_its_memory_counted(monkeypatch):
    calls, mps = [], torch.device("mps")
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.mps, name, lambda name=name: calls.append(name))
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 3 << 20)
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 8 << 20)
    device.reset_peak_memory(mps)
    device.synchronise(mps)
    assert calls == ["empty_cache", "synchronize"]
    assert device.peak_memory(mps) == 3 << 20
    assert free_memory(mps) == 5 << 20


def test_hub_is_reachable_only_where_something_answers(monkeypatch):
    class NotFound(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_error(404)

        def log_message(self, *args):
            pass

    class Other(socketserver.BaseRequestHandler):
        def handle(self):
            self.request.recv(1024)
            self.request.sendall(b"220 mail\r\n\r\n")

    with socketserver.TCPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(machine, "HUB", f"http://127.0.0.1:{server.server_address[1]}")
        assert not machine.hub_is_reachable()
        server.shutdown()
    with http.server.HTTPServer(("127.0.0.1", 0), NotFound) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(machine, "HUB", f"http://127.0.0.1:{server.server_port}")
        assert machine.hub_is_reachable()
        server.shutdown()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setattr(machine, "HUB", f"http://127.0.0.1:{closed.getsockname()[1]}")
        assert not machine.hub_is_reachable()


@pytest.mark.parametrize(
    ("argv", "reachable", "offline"),
    [
        (FOUR, True, True),  # all is bundled: no look at the network
        (["textvqa_val", *FOUR[1:]], True, False),
        (["textvqa_val", *FOUR[1:]], False, True),
        (["tiny_textvqa", "org/model", *FOUR[2:]], True, False),
    ],
)
def test_hub_client_is_told_to_stay_offline_where_the_hub_is_not_needed_or_not_there(
    argv, reachable, offline, monkeypatch
):
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setattr(machine, "hub_is_reachable", lambda: reachable)
    machine.set_offline(parse(argv))
    assert os.environ.get("HF_HUB_OFFLINE") == ("1" if offline else None)


def test_only_the_first_process_speaks(monkeypatch, capsys):
    for rank in (None, "0", "1"):
        monkeypatch.delenv("RANK", raising=False) if rank is None else monkeypatch.setenv("RANK", rank)
        machine.say(f"rank {rank}")
    assert capsys.readouterr().out == "rank None\nrank 0\n"


def test_what_was_hidden_from_the_garbage_collector_before_stays_hidden():
    gc.freeze()
    before = gc.get_freeze_count()
    with machine.settled():
        pass
    assert gc.get_freeze_count() >= before


def test_what_an_evaluation_hid_from_the_garbage_collector_is_seen_again(monkeypatch):
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)  # as where nobody else hides anything
    thawed = []
    monkeypatch.setattr(gc, "unfreeze", lambda: thawed.append(True))
    with machine.settled():
        assert not thawed
    assert thawed
