"""Put on PYTHONPATH by a test: writes down each call of DTensor.full_tensor with its caller, in every process of the run."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import traceback
from types import ModuleType
from typing import Any

_TARGET = "torch.distributed.tensor._api"


def _watch(module: ModuleType) -> None:
    plain = module.DTensor.full_tensor

    def full_tensor(self: Any, *args: Any, **kwargs: Any) -> Any:
        callers = [frame.filename for frame in traceback.extract_stack()]
        with open(os.environ["HEADRACE_FULL_TENSOR_LOG"], "a", encoding="utf-8") as file:
            file.write(json.dumps({"num_elements": self.numel(), "callers": callers}) + "\n")
        return plain(self, *args, **kwargs)

    module.DTensor.full_tensor = full_tensor


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name != _TARGET:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            _watch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if os.environ.get("HEADRACE_FULL_TENSOR_LOG"):
    sys.meta_path.insert(0, _Finder())
