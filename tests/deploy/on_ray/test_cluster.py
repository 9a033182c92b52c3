"""Clusters that are not there. Those that are: tests/system/test_ray.py."""

from __future__ import annotations

import pytest

from deploy.launch import fleet_of
from deploy.on_ray.cluster import connected


def test_an_address_where_nothing_answers_is_told_at_once() -> None:
    with pytest.raises(ValueError, match=r"cluster.ray.address=127.0.0.1:9: nothing answers there .Connection refused.: start a cluster"):
        with connected("127.0.0.1:9"):
            pass


def test_ray_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for name in [name for name in sys.modules if name.startswith("deploy.on_ray.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ValueError, match=r"--backend ray: ray is not installed here: pip install \"\.\[ray\]\""):
        fleet_of("ray")


def test_a_service_that_ray_killed_for_memory_is_told_so() -> None:
    from ray.exceptions import ActorDiedError, OutOfMemoryError

    from deploy.on_ray.launcher import _lost

    assert _lost(OutOfMemoryError("many\nlines")).startswith("Ray killed it, since the memory of its machine was nearly full")
    assert _lost(ActorDiedError()) == "its actor or its machine was lost: ActorDiedError"
