"""NCCL deadlines on a CUDA machine; a script, not collected by pytest:  PYTHONPATH=. python tests/gpu/nccl_deadline.py

Each case runs in a process of its own that first makes an NCCL default group, as a trainer does, then a push group of two
ranks of which only rank 0 is there, and afterwards does FSDP2 work in the default group. Prints one JSON object a case and,
last, {"passed": bool}.

absent   the peer never reaches the store: an error by the deadline that names it
silent   the peer announces itself and then never joins the communicator: an error by the deadline, though NCCL waits for ever
alone    a group of one: a broadcast of 256 MiB arrives, twice, at what speed
split    a group of one with two parts: both are split from the whole (comm_split_count), and bytes pass in both

NCCL refuses two ranks on one device, so a push between two processes cannot be tried on one GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from protos.weights.backends import tolerate_push_failures
from protos.weights.errors import TransferError
from protos.weights.group import GroupAddress, TransferGroup

DEADLINE_S = 3.0
LINGER_S = 6.0  # long enough for a watchdog to act if it were to
ROLES = ["trainer rank 0", "receiver 1"]


def fsdp_step() -> float:
    """One update of a small FSDP2 model in the default group; seconds."""
    began = time.monotonic()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).cuda()
    fully_shard(model, mesh=init_device_mesh("cuda", (1,)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(8, 64, device="cuda")).square().mean().backward()
    optimizer.step()
    total = torch.ones(1, device="cuda")
    dist.all_reduce(total)
    torch.cuda.synchronize()
    assert total.item() == 1.0
    return time.monotonic() - began


def failing(store: dist.TCPStore, case: str) -> dict[str, object]:
    """The push group's failure, timed."""
    address = GroupAddress(transport="nccl", host="127.0.0.1", port=store.port, key=case)
    if case == "silent":
        dist.PrefixStore(case, store).set("here/1", "1")
    bucket = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    began, error = time.monotonic(), ""
    try:
        group = TransferGroup.connect(address, rank=0, roles=ROLES, timeout_s=DEADLINE_S, device=torch.device("cuda", 0))
        began = time.monotonic()
        group.broadcast(bucket, what="bucket 0", timeout_s=DEADLINE_S)
    except TransferError as failure:
        error = str(failure)
    return {"error": error, "error_s": round(time.monotonic() - began, 3)}


def passing(store: dist.TCPStore, case: str) -> dict[str, object]:
    """A group of one over the whole path; with two parts, in each."""
    parts = [(0,), (0,)] if case == "split" else [(0,)]
    address = GroupAddress(transport="nccl", host="127.0.0.1", port=store.port, key=case)
    began = time.monotonic()
    group = TransferGroup.connect(address, rank=0, roles=ROLES[:1], timeout_s=30.0, device=torch.device("cuda", 0), parts=parts)
    connect_s, splits = round(time.monotonic() - began, 3), group._whole.comm_split_count()
    bucket = torch.arange(256 << 20, device="cuda").to(torch.uint8)
    seconds = []
    for number in range(2):
        began = time.monotonic()
        group.broadcast(bucket, what=f"bucket {number}", timeout_s=30.0, part=number % len(parts))
        seconds.append(round(time.monotonic() - began, 4))
    group.close()
    intact = bool((bucket[:512] == torch.arange(512, device="cuda").to(torch.uint8)).all())
    return {"error": "", "connect_s": connect_s, "splits": splits, "broadcast_s": seconds, "intact": intact and splits == (2 if case == "split" else 0)}


def nccl_environment() -> dict[str, str]:
    """What torch reads when a group is made."""
    return {name: value for name, value in os.environ.items() if "NCCL" in name}


def child(case: str) -> None:
    tolerate_push_failures()
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60))
    before = nccl_environment()
    first_s = fsdp_step()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=30))
    result = passing(store, case) if case in ("alone", "split") else failing(store, case)
    environment_kept = nccl_environment() == before
    again = [fsdp_step()]
    time.sleep(LINGER_S)
    again.append(fsdp_step())
    result |= {
        "case": case,
        "fsdp_before_s": round(first_s, 3),
        "fsdp_after_s": [round(s, 3) for s in again],
        "environment_kept": environment_kept,
        "threads": sorted(t.name for t in threading.enumerate() if t.name.startswith("weights")),  # none: nothing is left blocked in NCCL
    }
    print(json.dumps(result), flush=True)
    dist.destroy_process_group()


def check(case: str, run: subprocess.Popen[str]) -> bool:
    """One case's process; whether it did what the page says."""
    stdout, _ = run.communicate(timeout=150)
    lines = stdout.strip().splitlines()
    result = json.loads(lines[-1]) if lines else {"case": case, "error": "the process printed nothing"}
    result |= {"exit_code": run.returncode, "torch": torch.__version__, "nccl": list(torch.cuda.nccl.version())}
    if case in ("alone", "split"):
        passed = result.get("intact") is True
    else:
        passed = "receiver 1" in str(result["error"]) and float(result.get("error_s", 1e9)) < DEADLINE_S + 1.0
    passed = passed and run.returncode == 0 and result.get("environment_kept") is True
    print(json.dumps({**result, "passed": passed}), flush=True)
    return bool(passed)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        child(sys.argv[1])
    else:
        cases = {case: subprocess.Popen([sys.executable, __file__, case], stdout=subprocess.PIPE, text=True) for case in ("absent", "silent", "alone", "split")}  # side by side
        print(json.dumps({"passed": all(list(map(check, cases, cases.values())))}))
