"""Reward models: batched answers are those of one item alone, and a replica that dies costs nothing."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from reward_server.models.front import Front
from reward_server.models.fronts import fronts
from reward_server.models.spec import ModelSpec, check_devices, micro_batches
from reward_server.outcome import Scored
from reward_server.scorers import generative_reward, reward_model
from tests.reward_server.endpoints.conftest import plane_of, score
from tests.reward_server.models import causal, classifier

TEXTS = [("1 + 1?", "2"), ("1 + 1?", "It is 3, I would say, since one and one and one more make three."), ("", ""), ("x" * 50, "é\n"), ("a", "b" * 90)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("reward-models")


@pytest.mark.parametrize(
    ("lengths", "most_items", "most_tokens", "batches"),
    [
        ([5, 1, 4], 9, 8, [[0], [2, 1]]),  # 2 × 5 > 8; 2 × 4 = 8
        ([1, 1, 1], 2, 99, [[0, 1], [2]]),
        ([20, 3], 9, 8, [[0], [1]]),  # a long one goes alone
        ([], 9, 8, []),
    ],
)
def test_items_of_like_length_go_together_within_bounds(lengths: list[int], most_items: int, most_tokens: int, batches: list[list[int]]) -> None:
    assert micro_batches(lengths, most_items=most_items, most_tokens=most_tokens) == batches


@pytest.mark.parametrize(
    ("devices", "tensor_parallel", "words"),
    [
        ([], 1, "is no device"),
        (["gpu0"], 1, "'gpu0' is no device"),
        (["cuda:0", "cpu"], 1, "different kinds"),
        (["cuda:0", "cuda:0"], 1, "'?cuda:0'? is named twice"),
        (["cuda:0", "cuda:1", "cuda:2"], 2, "3 devices do not make replicas of tensor_parallel=2"),
    ],
)
def test_devices_that_make_no_replicas_are_refused(devices: list[str], tensor_parallel: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_devices(devices, tensor_parallel)
    assert ModelSpec(kind="classification", model="m", devices=("cuda:0", "cuda:1", "cuda:2", "cuda:3"), tensor_parallel=2).replicas() == [("cuda:0", "cuda:1"), ("cuda:2", "cuda:3")]


def test_a_batch_of_conversations_scores_as_each_alone_by_a_plain_forward(folder: Path) -> None:
    import torch
    import transformers

    from reward_server.models import asking

    made = classifier(folder)
    model = asking.load(ModelSpec(kind="classification", model=str(made), batch_items=3), "cpu")
    answers = model.answers(TEXTS)
    plain = transformers.AutoModelForSequenceClassification.from_pretrained(made, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(made)
    for (prompt, completion), answer in zip(TEXTS, answers, strict=True):
        text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n{completion}<|im_end|>\n"  # the template of deploy.models, by hand
        with torch.inference_mode():
            expected = plain(torch.tensor([tokenizer.encode(text, add_special_tokens=False)])).logits[0, 0].item()
        assert answer == pytest.approx(expected, abs=1e-4)
    assert len({round(float(answer), 3) for answer in answers}) == len(TEXTS)


def test_a_label_of_several_must_be_named_and_a_model_without_a_head_is_refused(folder: Path) -> None:
    from reward_server.models import asking

    made = classifier(folder, num_labels=3)
    with pytest.raises(ValueError, match=r"label=None is none of the 3 labels .* 'LABEL_2'"):
        asking.load(ModelSpec(kind="classification", model=str(made)), "cpu")
    by_name = asking.load(ModelSpec(kind="classification", model=str(made), label="LABEL_2"), "cpu").answers(TEXTS[:1])
    by_index = asking.load(ModelSpec(kind="classification", model=str(made), label=2), "cpu").answers(TEXTS[:1])
    assert by_name == by_index != asking.load(ModelSpec(kind="classification", model=str(made), label=0), "cpu").answers(TEXTS[:1])
    with pytest.raises(ValueError, match=r"no weights for score.weight: it is no SequenceClassification model"):
        asking.load(ModelSpec(kind="classification", model=str(causal(folder))), "cpu")
    with pytest.raises(ValueError, match=r"model='/no/such' cannot be read"):
        asking.load(ModelSpec(kind="classification", model="/no/such"), "cpu")


def test_a_conversation_over_the_limit_is_told_with_its_length_and_never_cut(folder: Path) -> None:
    from reward_server.models import asking

    model = asking.load(ModelSpec(kind="classification", model=str(classifier(folder)), max_tokens=20, chat=False), "cpu")
    short, long = model.answers([("a" * 10, "b" * 10), ("a" * 10, "b" * 11)])
    assert isinstance(short, float) and long == "the conversation has 21 tokens, more than max_tokens=20"


def test_yes_or_no_is_the_probability_of_the_next_token_and_a_number_is_what_is_written(folder: Path) -> None:
    import torch
    import transformers

    from reward_server.models import asking

    made = causal(folder)
    template = "{{ prompt }}|{{ completion }}"
    model = asking.load(ModelSpec(kind="yes_no", model=str(made), template=template, chat=False), "cpu")
    answers = model.answers(TEXTS[1:])
    plain = transformers.AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(made)
    yes, no = (tokenizer.encode(word, add_special_tokens=False)[0] for word in ("Yes", "No"))
    for (prompt, completion), answer in zip(TEXTS[1:], answers, strict=True):
        with torch.inference_mode():
            logits = plain(torch.tensor([tokenizer.encode(f"{prompt}|{completion}", add_special_tokens=False)])).logits[0, -1]
        assert answer == pytest.approx(torch.sigmoid(logits[yes] - logits[no]).item(), abs=1e-4)  # of two: e^a / (e^a + e^b)
    with pytest.raises(ValueError, match="begin with the same token"):
        asking.load(ModelSpec(kind="yes_no", model=str(made), template=template, answers=("Yes", "Yep")), "cpu")
    number = asking.load(ModelSpec(kind="number", model=str(made), template=template, max_new_tokens=4), "cpu")
    written = number.answers(TEXTS[:2])
    assert all(isinstance(each, float) or "is no number from 0 to 10" in each for each in written)
    assert number._number("I say 7.5 of 10") == 7.5 and "no number" in str(number._number("77"))  # type: ignore[attr-defined]


@pytest.fixture
def stopped() -> Iterator[None]:
    yield
    asyncio.run(fronts.stop())


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_two_replicas_share_the_calls_of_everybody_and_one_that_is_killed_is_replaced(folder: Path) -> None:
    front = Front(ModelSpec(kind="classification", model=str(classifier(folder)), devices=("cpu", "cpu"), threads=1, batch_items=8), batch_limit_s=60.0)
    front.start()
    try:
        alone = [await front.score(*item) for item in TEXTS]
        many = await asyncio.gather(*(front.score(*TEXTS[index % 5]) for index in range(100)))
        assert [round(float(value), 4) for value in many] == [round(float(alone[index % 5]), 4) for index in range(100)]
        calls = [asyncio.create_task(front.score(*TEXTS[index % 5])) for index in range(64)]
        await asyncio.sleep(0.01)
        os.kill(front._replicas[0]._processes[0].pid, signal.SIGKILL)
        values = await asyncio.wait_for(asyncio.gather(*calls), 100)
        assert [round(float(value), 4) for value in values] == [round(float(alone[index % 5]), 4) for index in range(64)]
    finally:
        await front.stop()
    assert all(not replica._processes for replica in front._replicas)


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_replica_split_over_two_ranks_scores_as_a_whole_one(folder: Path) -> None:
    made = str(classifier(folder))
    whole, split = (Front(ModelSpec(kind="classification", model=made, devices=("cpu",) * ranks, tensor_parallel=ranks, threads=1), batch_limit_s=60.0) for ranks in (1, 2))
    try:
        for front in (whole, split):
            front.start()
        for item in TEXTS:
            assert await split.score(*item) == pytest.approx(await whole.score(*item), abs=1e-4)
    finally:
        await whole.stop()
        await split.stop()


@pytest.mark.slow
@pytest.mark.timeout(120)
async def test_the_scorers_start_their_model_once_and_refuse_one_that_will_not_do(folder: Path, stopped: None) -> None:
    args = {"model": str(classifier(folder)), "threads": 1}
    reward_model.check(**args)
    value = await reward_model.score("1 + 1?", "2", {}, **args)  # type: ignore[arg-type]
    assert isinstance(value, float) and len(fronts._started) == 1
    assert await reward_model.score("1 + 1?", "2", {}, scale=2.0, **args) == pytest.approx(2 * value)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no weights for score.weight"):
        reward_model.check(model=str(causal(folder)))
    with pytest.raises(ValueError, match="template: it names reply"):
        generative_reward.check(model=str(causal(folder)), template="{{ reply }}")
    generative_reward.check(model=str(causal(folder)), threads=1)
    chance = await generative_reward.score("1 + 1?", "2", {}, model=str(causal(folder)), threads=1)
    assert isinstance(chance, float) and 0 < chance < 1
    await fronts.stop()


@pytest.mark.slow
@pytest.mark.timeout(180)
async def test_a_served_model_has_a_process_to_itself_and_goes_with_the_server(folder: Path) -> None:
    from reward_server.models import asking

    made = str(classifier(folder))
    args = {"model": made, "devices": ["cpu", "cpu"], "threads": 1}
    sections = ({"name": "same", "use": "exact"}, {"name": "model", "use": "reward_model", "limit_s": 60, "args": args})
    me = psutil.Process()
    async with plane_of(*sections, workers=1, spares=1, load_limit_s=60) as plane:
        outcomes = await asyncio.gather(*(score(plane, TEXTS[index % 5][1], name="model", prompt=TEXTS[index % 5][0], owner=index % 3) for index in range(40)))
        expected = asking.load(ModelSpec(kind="classification", model=made), "cpu").answers(TEXTS)
        assert [outcome.value for outcome in outcomes if isinstance(outcome, Scored)] == [pytest.approx(expected[index % 5], abs=1e-4) for index in range(40)]
        assert (await score(plane, "5", name="same", answer="5")) == Scored(value=1.0)
        commands = [" ".join(each.cmdline()) for each in me.children(recursive=True)]
        assert sum("reward_server.models.replica" in each for each in commands) == 2  # one a device, whatever workers and spares are
        await asyncio.sleep(1.0)  # longer than patience_s: nothing is set aside, and no second process loads the model
        assert sum("reward_server.worker" in " ".join(each.cmdline()) for each in me.children(recursive=True)) == 3
    async with asyncio.timeout(60):
        while any("reward_server" in " ".join(each.cmdline()) for each in me.children(recursive=True)):
            await asyncio.sleep(0.05)
