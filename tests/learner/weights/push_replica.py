"""One receiving process of test_push.py. A line on stdin: group and manifest in hexadecimal; the answer: one JSON line."""

from __future__ import annotations

import json
import sys
import time

import torch
import xxhash

from protos.weights.landing import Landing

landing = Landing()
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    group, manifest, version = line.split()
    landing.begin_receive(bytes.fromhex(group), bytes.fromhex(manifest), 20.0)
    while landing.state().phase == "receiving":
        time.sleep(0.01)
    state = landing.state()
    digests = {}
    if state.phase == "ready":
        tensors = landing.take(int(version)).tensors()
        digests = {name: xxhash.xxh3_64_hexdigest(tensor.reshape(-1).view(torch.uint8).numpy().data) for name, tensor in tensors}
    print(json.dumps({"phase": state.phase, "detail": state.detail, "digests": digests}), flush=True)
