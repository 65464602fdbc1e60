"""The files of wandb's offline runs, read with wandb's own reader."""

import json
from pathlib import Path
from typing import Any

import wandb
from wandb.proto import wandb_internal_pb2
from wandb.sdk.internal.datastore import DataStore


def read_run(folder: Path) -> dict[str, Any]:
    """Read the only run under a folder; see `read_runs`."""
    (run,) = read_runs(folder)
    return run


def read_runs(folder: Path) -> list[dict[str, Any]]:
    """Read the offline runs under a folder, in the order of their start.

    Each has `project`, `group`, `id`, `sweep`, `exit`, `config`, `summary`, `history` (one dict per step) and
    `artifacts` (`name`, `type`, and `files`: path in the artifact -> path on this machine)."""
    wandb.teardown()  # waits for its writing process
    return [_read(file) for file in sorted(folder.rglob("*.wandb"), key=lambda file: file.parent.name)]


def _read(file: Path) -> dict[str, Any]:
    store = DataStore()
    store.open_for_scan(str(file))
    found: dict[str, Any] = {"config": {}, "summary": {}, "history": [], "artifacts": []}
    while (data := store.scan_data()) is not None:
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            found |= {"project": record.run.project, "group": record.run.run_group, "id": record.run.run_id}
            found["sweep"] = record.run.sweep_id
            found["config"] |= _values(record.run.config.update)
        elif kind == "config":
            found["config"] |= _values(record.config.update)
        elif kind == "summary":
            found["summary"] |= _values(record.summary.update)
        elif kind == "history":
            found["history"].append(_values(record.history.item))
        elif kind == "artifact":
            files = {entry.path: entry.local_path for entry in record.artifact.manifest.contents}
            found["artifacts"].append({"name": record.artifact.name, "type": record.artifact.type, "files": files})
        elif kind == "exit":
            found["exit"] = record.exit.exit_code
    return found


def _values(items: Any) -> dict[str, Any]:
    return {item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}
