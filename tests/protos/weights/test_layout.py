"""Where checkpoint tensors lie in an engine's parameters, by hand."""

from __future__ import annotations

import pytest

from protos.weights.blocks import Part
from protos.weights.layout import Engine, Place, engine_of, place_of

CONFIG = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "hidden_size": 16, "intermediate_size": 12, "vocab_size": 100}


def engine(num_workers: int = 1, worker: int = 0, **changes: int) -> Engine:
    made = engine_of({**CONFIG, **changes}, num_workers=num_workers, worker=worker)
    assert made is not None
    return made


def rows(name: str, shape: tuple[int, ...], of: Engine) -> tuple[str, int, int, int]:
    place = place_of(name, shape, of)
    assert place is not None
    return place.parameter, place.row, place.first, place.count


def test_q_k_and_v_follow_one_another_in_one_parameter() -> None:
    # 4 heads of 8 are 32 rows of q, 2 kv heads are 16 rows each of k and v.
    names = {"q_proj": 32, "k_proj": 16, "v_proj": 16}
    found = {name: rows(f"model.layers.0.self_attn.{name}.bias", (size,), engine()) for name, size in names.items()}
    fused = "model.layers.0.self_attn.qkv_proj.bias"
    assert found == {"q_proj": (fused, 0, 0, 32), "k_proj": (fused, 32, 0, 16), "v_proj": (fused, 48, 0, 16)}


def test_the_second_of_two_workers_has_the_second_half_of_every_head_list() -> None:
    second = engine(2, 1)
    assert rows("l.self_attn.q_proj.weight", (32, 16), second)[1:] == (0, 16, 16)
    assert rows("l.self_attn.k_proj.weight", (16, 16), second)[1:] == (16, 8, 8)
    assert rows("l.self_attn.v_proj.weight", (16, 16), second)[1:] == (24, 8, 8)
    assert rows("l.mlp.up_proj.weight", (12, 16), second)[1:] == (6, 6, 6)
    assert place_of("l.mlp.down_proj.weight", (16, 12), second) == Place(parameter="l.mlp.down_proj.weight", row=0, first=0, count=16, first_column=6, columns=6)


def test_fewer_kv_heads_than_workers_are_kept_by_several() -> None:
    # 2 kv heads on 4 workers: workers 0 and 1 keep head 0, workers 2 and 3 head 1.
    assert [rows("l.self_attn.k_proj.weight", (16, 16), engine(4, worker))[2:] for worker in range(4)] == [(0, 8), (0, 8), (8, 8), (8, 8)]


def test_workers_share_a_padded_vocabulary_and_the_padding_is_nobody_s() -> None:
    # 100 rows are padded to 128: 64 for worker 0, the remaining 36 for worker 1.
    assert [rows("lm_head.weight", (100, 16), engine(2, worker))[2:] for worker in range(2)] == [(0, 64), (64, 36)]


def test_norms_and_biases_of_column_cuts_are_everybody_s() -> None:
    for name in ("model.norm.weight", "l.self_attn.q_norm.weight", "l.self_attn.o_proj.bias"):
        assert rows(name, (16,), engine(2, 1)) == (name, 0, 0, 16)


@pytest.mark.parametrize(("name", "shape"), [("l.mlp.experts.0.gate_proj.weight", (12, 16)), ("l.mlp.gate_proj.weight", (11, 16)), ("l.mlp.router.weight", (4, 16)), ("l.conv", (3, 3, 3))])
def test_what_the_scheme_does_not_know_is_said_to_be_unknown(name: str, shape: tuple[int, ...]) -> None:
    assert place_of(name, shape, engine(2, 0)) is None


def test_a_model_that_does_not_divide_among_workers_has_no_layout() -> None:
    assert engine_of(CONFIG, num_workers=3) is None
    assert engine_of({"hidden_size": 16}) is None


def test_columns_in_bytes() -> None:
    place = place_of("l.mlp.down_proj.weight", (16, 12), engine(2, 1))
    assert place is not None
    assert place.part((16, 12), 2) == Part(first_row=0, num_rows=16, first_byte=12, num_bytes=12, row_bytes=24, total_rows=16)
