"""Addresses that gRPC would take for others."""

from __future__ import annotations

import pytest

from protos import rpc
from protos.mistakes import check_address, of_validation


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:99999", "learner='127.0.0.1:99999': port 99999 lies outside 1 to 65535"),  # gRPC: 99999 - 65536 = 34463
        ("127.0.0.1:0", "port 0 lies outside 1 to 65535"),
        ("localhost", "learner='localhost' must be host:port"),  # gRPC: port 443
        ("localhost:http", "must be host:port"),
        ("127.0.0.1:-1", "must be host:port"),
        ("", "must be host:port"),
    ],
)
def test_an_address_that_nobody_could_answer_on_is_refused(address: str, words: str) -> None:
    with pytest.raises(ValueError) as caught:
        check_address("learner", address)
    assert words in str(caught.value)


@pytest.mark.parametrize(("address", "split"), [("[::1]:7430", ("[::1]", 7430)), ("h:65535", ("h", 65535))])
def test_an_address_is_split_at_its_last_colon(address: str, split: tuple[str, int]) -> None:
    assert check_address("learner", address) == split


async def test_a_server_refuses_a_port_that_grpc_would_wrap() -> None:
    with pytest.raises(ValueError, match="port 99999 lies outside 0 to 65535; choose one that does not, or 0 for a free one"):
        await rpc.Server("127.0.0.1:99999", []).start()


def test_a_list_that_is_short_because_its_items_are_wrong_has_no_line_of_its_own() -> None:
    wrong = {"loc": ("scorers", 0, "us"), "type": "extra_forbidden", "msg": "", "input": 1}
    short = {"loc": ("scorers",), "type": "too_short", "msg": "Tuple should have at least 1 item", "input": [{"us": 1}]}
    assert of_validation([wrong, short], "f.yaml") == ["f.yaml: scorers.0.us: unknown key (value 1): remove it or correct its spelling"]
    assert of_validation([{**short, "input": []}], "") == ["scorers: Tuple should have at least 1 item, got []; correct it"]
