"""What a configuration of TLS and tokens comes to, and what it refuses to start with."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from protos.security import SecurityConfig, resolve, secret
from tests.certificates import Authority


def config(**values: Any) -> SecurityConfig:
    return SecurityConfig.model_validate(values)


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("s3cret\n")
    return tmp_path / "token"


def test_a_token_comes_from_a_file_or_a_variable_and_shows_nowhere(token_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RUN_TOKEN", "s3cret")
    for given in (config(token_file=token_file), config(token_env="RUN_TOKEN")):
        made = resolve(given)
        assert made.token == "s3cret" and "s3cret" not in repr(made) + repr(given) + given.model_dump_json()


@pytest.mark.parametrize("address", ["127.0.0.1:7430", "localhost:1", "[::1]:7430", "unix:/run/x"])
def test_loopback_needs_neither_tls_nor_token(address: str) -> None:
    assert resolve(config(), address=address).token == ""


@pytest.mark.parametrize(
    ("given", "lacks"),
    [({}, "no tls and no token"), ({"off": ["token"]}, "no tls;"), ({"off": ["tls"]}, "no token;"), ({"off": ["tls", "token"]}, "")],
)
@pytest.mark.parametrize("address", ["0.0.0.0:7430", "10.0.0.7:7430", "[::]:7430", "learner:7430"])
def test_an_address_that_others_reach_needs_both_or_the_word_that_it_does_without(given: dict[str, Any], lacks: str, address: str) -> None:
    if not lacks:
        resolve(config(**given), address=address)
        return
    with pytest.raises(ValueError, match=lacks) as caught:
        resolve(config(**given), address=address)
    assert f"address={address} can be reached from other machines" in str(caught.value) and "security.off" in str(caught.value)


def test_both_given_serve_any_address(tmp_path: Path, token_file: Path) -> None:
    certificate, key = Authority(tmp_path).sign("server", days=1)
    made = resolve(config(certificate=certificate, key=key, token_file=token_file), address="0.0.0.0:7430")
    assert (made.certificate, made.key, made.token) == (certificate, key, "s3cret")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"certificate": "c.pem"}, "a server needs both"),
        ({"ca": "nowhere.pem"}, "security.ca=nowhere.pem: no file that can be read"),
        ({"token_file": "nowhere"}, "security.token_file=nowhere: no file"),
        ({"token_env": "NOT_SET_ANYWHERE"}, "this environment variable is not set"),
        ({"token_env": "A", "token_file": "b"}, "one place only"),
    ],
)
def test_a_mistake_is_told_in_one_line(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        resolve(config(**given))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["", "two words", "line\nbreak", "ümlaut"])
def test_a_token_that_is_no_word_is_refused_without_being_repeated(tmp_path: Path, text: str) -> None:
    (tmp_path / "token").write_text(text)
    with pytest.raises(ValueError, match="must be one word") as caught:
        secret("security", "", tmp_path / "token")
    assert not text or text not in str(caught.value)


def test_unknown_keys_fail() -> None:
    with pytest.raises(ValueError, match="token"):
        config(token="written into the file")
    logging.getLogger().debug("nothing is logged")


def test_what_is_no_certificate_or_another_s_key_is_told_before_anything_listens(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    certificate, key = authority.sign("server", days=1)
    _, other = authority.sign("other", days=1)
    for wrong in (other, authority.ca):
        with pytest.raises(ValueError, match="no certificate chain in PEM with its private key") as caught:
            resolve(config(certificate=certificate, key=wrong))
        assert f"security.key={wrong}" in str(caught.value) and "\n" not in str(caught.value)
    (tmp_path / "text").write_text("no PEM")
    with pytest.raises(ValueError, match=r"security\.ca=.*text: holds no certificate in PEM"):
        resolve(config(ca=tmp_path / "text"))
    assert resolve(config(ca=authority.ca, certificate=certificate, key=key)).ca == authority.ca
