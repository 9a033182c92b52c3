"""The ledger, case by case."""

from __future__ import annotations

from typing import Any

import pytest

from learner.config import LearnerConfig
from learner.gateway.groups import group_id, seq_of
from learner.gateway.ledger import Ledger, Limits, SampleFacts, Submission
from learner.gateway.versions import StalenessBroken, staleness
from learner.gateway.window import choose, max_open


def facts(reward: float | None = 1.0, *, version: int = 1, tokens: int = 2, reason: str = "") -> SampleFacts:
    return SampleFacts(
        reward=reward, unusable_reason=reason, num_prompt_tokens=3, num_completion_tokens=tokens, num_trained_tokens=tokens, spans=((version, tokens),)
    )


def unscored() -> SampleFacts:
    return facts(None, reason="unscored_timeout")


def started(**rules: Any) -> Ledger:
    """P = 2, G = 2, S = 1, policy 0 published as version 1."""
    ledger = Ledger(Limits(**{"groups_per_step": 2, "group_size": 2, "max_staleness": 1, **rules}))
    ledger.publish(0)
    return ledger


def opened(ledger: Ledger, num_groups: int = 1, holder: str = "a", lapse_at: float = 10.0) -> list[str]:
    names = []
    for _ in range(num_groups):
        seq = ledger.next_seq
        group, _record = ledger.open_group(holder=holder, lease_id=f"lease-{seq}", now=0.0, lapse_at=lapse_at, prompt_id=f"p{seq}", prompt_row=seq)
        names.append(group.group_id)
    return names


def completed(ledger: Ledger, name: str, rewards: tuple[float | None, ...] = (0.0, 1.0), version: int = 1) -> Submission:
    for index, reward in enumerate(rewards):
        answer = ledger.submit(name, index, facts(reward, version=version) if reward is not None else unscored())
        if answer.group == "dropped":  # it may be known before the group is complete
            break
    return answer


def stepped(ledger: Ledger) -> None:
    """One whole step with fresh groups."""
    published = ledger.published
    assert published is not None
    for name in opened(ledger, ledger.limits.groups_per_step):
        completed(ledger, name, version=published.number)
    assert ledger.form(ledger.step)[0] is not None
    ledger.publish(ledger.step + 1)


# Arithmetic


def test_at_most_s_plus_one_batches_less_the_window_are_open() -> None:
    # faults.md 97: what may be outstanding while the learner stands still
    assert max_open(groups_per_step=8, max_staleness=1, window=1) == 16
    assert max_open(groups_per_step=8, max_staleness=3, window=5) == 28  # 4 * 8 - 4
    assert max_open(groups_per_step=4, max_staleness=0, window=1) == 4


def test_a_window_that_leaves_less_than_a_batch_open_is_refused() -> None:
    assert max_open(groups_per_step=2, max_staleness=1, window=3) == 2
    with pytest.raises(ValueError, match=r"window=4 .* 1 \* 2 \+ 1 = 3"):
        Limits(groups_per_step=2, group_size=2, max_staleness=1, window=4)
    with pytest.raises(ValueError, match="use a smaller window"):
        LearnerConfig.model_validate(
            {"run_dir": "r", "model": "m", "data": {"prompts": "p"}, "groups_per_step": 2, "staleness": {"max_staleness": 1, "window": 4}}
        )


def test_the_age_of_a_token_counts_steps_and_after_a_rollback_the_way_back_too() -> None:
    assert staleness(at_step=5, step=3, branch=3) == 2
    assert staleness(at_step=12, step=14, branch=10) == 6  # (14 - 10) + (12 - 10)
    with pytest.raises(StalenessBroken):  # a token of the future would count -56 and pass every bound
        staleness(at_step=1, step=57, branch=57)


def test_groups_enter_one_at_a_time_below_head_plus_window() -> None:
    done, missing = True, False
    assert choose([(4, missing), (5, done), (6, done)], num_groups=2, window=1) == []
    assert choose([(4, missing), (5, done), (6, done)], num_groups=2, window=2) == [5]
    assert choose([(4, missing), (5, done), (6, done)], num_groups=2, window=3) == [5, 6]
    # 4 enters, the head moves to 5, and 7 < 5 + 3 may enter before 5 and 6.
    assert choose([(4, done), (5, missing), (6, missing), (7, done), (8, done)], num_groups=3, window=3) == [4, 7]


def test_names_of_groups_are_read_back_and_others_are_not() -> None:
    assert seq_of(group_id(12)) == 12 and seq_of(group_id(10**9)) == 10**9
    assert [seq_of(name) for name in ("", "g", "x00000001", "g1", "g0000000１")] == [None] * 5


# Leases


def test_nothing_is_lent_before_a_version_is_published() -> None:
    ledger = Ledger(Limits(groups_per_step=2, group_size=2, max_staleness=1))
    assert ledger.room() == 0 and ledger.published is None
    ledger.publish(0)
    assert ledger.room() == 4


def test_places_are_free_again_when_a_version_is_published_and_not_before() -> None:
    ledger = started(max_staleness=0)
    for name in opened(ledger, 2):
        completed(ledger, name)
    assert ledger.room() == 0
    ledger.form(0)
    assert ledger.room() == 0
    ledger.publish(1)
    assert ledger.room() == 2


def test_a_lapsed_group_is_lent_again_before_new_ones_lowest_first_and_keeps_its_done_samples() -> None:
    # faults.md 97: a straggler past its time is released
    ledger = started()
    names = opened(ledger, 3)
    ledger.submit(names[1], 0, facts())
    assert ledger.next_lapse() == 10.0 and ledger.expire(9.9) is None
    ledger.expire(10.0)
    again, _ = ledger.lease_again(holder="b", lease_id="x", lapse_at=20.0)
    assert again.group_id == names[0] and again.attempts == 2
    again, _ = ledger.lease_again(holder="b", lease_id="y", lapse_at=20.0)
    assert again.group_id == names[1] and set(again.samples) == {0}
    assert ledger.num_leases("b") == 2 and ledger.counts().leased == 3


def test_a_lost_replica_frees_only_its_own_leases() -> None:
    ledger = started()
    opened(ledger, 1, holder="a")
    opened(ledger, 1, holder="b")
    ledger.release_holder("a", in_good_order=False)
    assert (ledger.num_leases("a"), ledger.num_leases("b")) == (0, 1)
    assert ledger.release_holder("a", in_good_order=False) is None
    assert ledger.release_lease("lease-1", in_good_order=False) is not None and ledger.num_leases("b") == 0


def test_after_too_many_attempts_a_group_is_dropped_and_its_place_is_free_at_once() -> None:
    ledger = started(max_staleness=0, max_attempts=2)
    (name, _other) = opened(ledger, 2, lapse_at=1.0)
    ledger.release_lease("lease-0", in_good_order=False)
    ledger.lease_again(holder="b", lease_id="x", lapse_at=20.0)
    ledger.release_lease("x", in_good_order=False)
    assert ledger.counts().dropped == {"attempts": 1} and ledger.room() == 1
    assert ledger.submit(name, 0, facts()).status == "unwanted"


def test_a_goodbye_counts_no_attempt() -> None:
    ledger = started(max_attempts=2)
    opened(ledger, 1)
    for _ in range(3):
        ledger.release_holder("a", in_good_order=True)
        ledger.lease_again(holder="a", lease_id="x", lapse_at=20.0)
    ledger.release_holder("a", in_good_order=False)  # the first attempt that failed
    assert ledger.counts().dropped == {}


# Submissions


def test_the_first_sample_of_an_identity_wins_and_later_ones_are_acknowledged() -> None:
    # faults.md 73
    ledger = started()
    (name,) = opened(ledger, 1)
    first = ledger.submit(name, 0, facts(0.5))
    assert (first.status, first.group) == ("accepted", "open") and first.record is not None
    second = ledger.submit(name, 0, facts(0.9))
    assert (second.status, second.record) == ("duplicate", None)
    group = ledger.group(name)
    assert group is not None and group.samples[0].reward == 0.5


def test_a_late_original_is_accepted_when_it_is_first_and_ends_the_second_lease() -> None:
    # faults.md 73: the other order
    ledger = started()
    (name,) = opened(ledger, 1)
    ledger.expire(10.0)
    ledger.lease_again(holder="b", lease_id="x", lapse_at=20.0)
    assert completed(ledger, name).group == "complete"  # from the first holder
    assert ledger.num_leases("b") == 0
    assert ledger.submit(name, 1, facts()).status == "duplicate"  # from the second
    assert ledger.expire(20.0) is None


def test_a_group_completed_while_nobody_holds_it_is_not_lent_again() -> None:
    ledger = started()
    (name,) = opened(ledger, 1)
    ledger.expire(10.0)
    completed(ledger, name)
    assert ledger.next_release() is None


def test_unknown_groups_are_unwanted_and_impossible_samples_are_refused() -> None:
    ledger = started()
    (name,) = opened(ledger, 1)
    assert ledger.submit("g00000007", 0, facts()).status == "unwanted"
    assert ledger.submit("nonsense", 0, facts()).status == "unwanted"
    with pytest.raises(ValueError, match="sample_index=2 is outside the group of 2"):
        ledger.submit(name, 2, facts())
    with pytest.raises(ValueError, match=r"version 2, but the lease asked for 1 .* newest published is 1"):
        ledger.submit(name, 0, facts(version=2))


def test_a_version_older_than_the_lease_asked_for_is_refused() -> None:
    # faults.md 35, 120: nor one that was never published
    ledger = started()
    stepped(ledger)
    (name,) = opened(ledger, 1)
    with pytest.raises(ValueError, match="version 1, but the lease asked for 2"):
        ledger.submit(name, 0, facts(version=1))


def test_facts_that_cannot_be_true_are_refused() -> None:
    with pytest.raises(ValueError, match="not finite"):
        facts(float("nan"))
    with pytest.raises(ValueError, match="why it has none"):
        facts(None)
    with pytest.raises(ValueError, match="do not sum"):
        SampleFacts(reward=0.0, num_prompt_tokens=1, num_completion_tokens=3, num_trained_tokens=3, spans=((1, 2),))


# Which groups are trained


@pytest.mark.parametrize(("num_usable", "outcome"), [(0, "dropped"), (1, "dropped"), (2, "complete"), (3, "complete"), (4, "complete")])
def test_a_group_needs_min_usable_usable_samples(num_usable: int, outcome: str) -> None:
    # faults.md 62: of four samples 1 usable is dropped and counted, 2 and 3 are a group of 2 and of 3
    ledger = started(group_size=4, min_usable=2)
    (name,) = opened(ledger, 1)
    rewards = tuple(float(index) if index < num_usable else None for index in range(4))
    answer = completed(ledger, name, rewards)
    assert (answer.group, answer.reason) == (outcome, "unusable" if outcome == "dropped" else "")
    if outcome == "dropped":
        assert ledger.counts().dropped == {"unusable": 1} and ledger.room() == 4


def test_one_unscored_sample_drops_its_group_where_that_is_the_rule() -> None:
    ledger = started(unscored="drop_group", min_usable=1)
    first, second = opened(ledger, 2)
    assert completed(ledger, first, (1.0, None)).reason == "unscored"
    ledger.submit(second, 0, facts(None, reason="non_finite_logprob"))  # unusable, but not for want of a score
    assert ledger.submit(second, 1, facts(1.0)).group == "complete"


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [
        ((0.4, 0.4, 0.4, 0.4), False),
        ((0.3, 0.5, 0.4, 0.4), True),
        ((1.0, 1.0, 1.0, 1.0), False),
        ((1.0, 1.0, 1.0, 1.0 + 1.19e-7), False),  # float noise is no signal
        ((1.0, 1.0, 1.0, 1.00001), True),  # a spread of 1e-5 is
        ((0.0, 0.0, 0.0, None), False),  # only usable samples count
        ((0.0, 1.0, None, None), True),
    ],
)
def test_zero_signal_is_a_spread_below_a_millionth_among_usable_samples(rewards: tuple[float | None, ...], kept: bool) -> None:
    # faults.md 65, 66: the spread is tested, not the mean
    ledger = started(group_size=4, zero_signal=True)
    (name,) = opened(ledger, 1)
    answer = completed(ledger, name, rewards)
    assert (answer.group, answer.reason) == (("complete", "") if kept else ("dropped", "zero_signal"))


def test_the_reward_of_an_unusable_sample_is_no_signal() -> None:
    ledger = started(group_size=3, zero_signal=True)
    (name,) = opened(ledger, 1)
    ledger.submit(name, 0, facts(0.0, reason="non_finite_logprob"))
    ledger.submit(name, 1, facts(1.0))
    assert ledger.submit(name, 2, facts(1.0)).reason == "zero_signal"


def test_groups_without_signal_are_kept_where_the_filter_is_off() -> None:
    ledger = started()
    (name,) = opened(ledger, 1)
    assert completed(ledger, name, (0.0, 0.0)).group == "complete"


def test_a_completion_of_only_the_stop_token_is_trained() -> None:
    ledger = started(groups_per_step=1, group_size=4)
    (name,) = opened(ledger, 1)
    for index, (reward, tokens) in enumerate([(1.0, 5), (0.0, 1), (1.0, 5), (1.0, 5)]):
        ledger.submit(name, index, facts(reward, tokens=tokens))
    plan, _ = ledger.form(0)
    assert plan is not None
    row = ledger.table(plan)[1]
    assert row.facts.usable and row.facts.num_trained_tokens == 1
    assert plan.tokens == ((0, 16),)  # 5 + 1 + 5 + 5


def test_with_nine_flat_groups_in_ten_every_batch_still_has_all_its_groups_with_signal() -> None:
    # faults.md 68: 90 % of prompts are constant; the batch is as large as ever, and nothing hangs
    ledger = started(groups_per_step=2, zero_signal=True, max_consecutive_drops=20)
    lent = 0
    for step in range(3):
        while (plan := ledger.form(step)[0]) is None:
            completed(ledger, opened(ledger, 1)[0], (0.0, 1.0) if lent % 10 == 9 else (1.0, 1.0), version=step + 1)
            lent += 1
        rewards = [row.facts.reward for row in ledger.table(plan)]
        assert rewards == [0.0, 1.0, 0.0, 1.0] and ledger.exhausted == ""
        ledger.publish(step + 1)
    assert (lent, ledger.counts().dropped, ledger.counts().trained) == (60, {"zero_signal": 54}, 6)


def test_two_rows_of_one_sample_are_one_sample() -> None:
    # faults.md 71: G = 3; rollout r1 comes in two rows, r2 in one: the group is not complete, and its baseline is that of {1, 0}
    ledger = started(groups_per_step=1, group_size=3)
    (name,) = opened(ledger, 1)
    statuses = [ledger.submit(name, index, facts(reward)).status for index, reward in ((0, 1.0), (0, 1.0), (1, 0.0))]
    assert statuses == ["accepted", "duplicate", "accepted"] and ledger.form(0)[0] is None
    group = ledger.group(name)
    assert group is not None and [one.reward for one in group.usable()] == [1.0, 0.0]  # mean .5, not .667


def test_too_many_drops_in_a_row_name_the_rule_the_count_and_the_way_out() -> None:
    ledger = started(max_consecutive_drops=2, zero_signal=True)
    for _ in range(2):
        completed(ledger, opened(ledger, 1)[0], (1.0, 1.0))
    assert ledger.exhausted == ""
    completed(ledger, opened(ledger, 1)[0], (0.0, 1.0))  # one good group starts the count again
    for _ in range(2):
        completed(ledger, opened(ledger, 1)[0], (1.0, 1.0))
    assert ledger.exhausted == ""
    completed(ledger, opened(ledger, 1)[0], (1.0, 1.0))
    # faults.md 68: nothing but constant prompts ends the run with a message
    assert "3 groups were dropped one after another, more than filter.max_consecutive_drops=2 (dropped so far: zero_signal: 5)" in ledger.exhausted
    assert "loosen `filter`" in ledger.exhausted


# Batches


def test_a_batch_is_formed_once_p_groups_can_enter_and_asking_again_gives_the_same() -> None:
    ledger = started()
    first, second, third = opened(ledger, 3)
    completed(ledger, second)
    completed(ledger, third)
    assert ledger.form(0) == (None, None)  # lease order: the first is the head and incomplete
    completed(ledger, first)
    plan, record = ledger.form(0)
    assert plan is not None and plan.groups == (0, 1) and record is not None
    assert ledger.form(0) == (plan, None)
    assert ledger.counts().waiting == 1


def test_the_table_has_every_sample_unusable_ones_too_by_identity() -> None:
    ledger = started(min_usable=1)
    for name in opened(ledger, 2):
        completed(ledger, name, (0.5, None))
    plan, _ = ledger.form(0)
    assert plan is not None
    assert [(row.group_id, row.sample_index, row.facts.usable) for row in ledger.table(plan)] == [
        ("g00000000", 0, True),
        ("g00000000", 1, False),
        ("g00000001", 0, True),
        ("g00000001", 1, False),
    ]


def test_tokens_count_by_the_version_that_drew_each() -> None:
    ledger = started(groups_per_step=1, min_usable=1)
    first, second = opened(ledger, 2)
    completed(ledger, first)
    ledger.form(0)
    ledger.publish(1)
    mixed = SampleFacts(reward=1.0, num_prompt_tokens=3, num_completion_tokens=9, num_trained_tokens=9, spans=((1, 5), (2, 4)))
    ledger.submit(second, 0, mixed)
    ledger.submit(second, 1, facts(0.0, version=2))
    plan, _ = ledger.form(1)
    assert plan is not None and plan.tokens == ((0, 6), (1, 5))  # 4 + 2 drawn by the newest, 5 by the one before
    assert [row.staleness for row in ledger.table(plan)] == [1, 0]
    ledger.publish(2)
    assert ledger.trained_tokens_by_staleness() == {0: 10, 1: 5}  # the first step trained 4 at age 0


def test_the_last_batch_may_be_short_when_the_prompts_have_ended() -> None:
    # faults.md 95: groups 0, 1, 2 with P = 2: [0, 1], then [2] and the end
    ledger = started()
    for name in opened(ledger, 3):
        completed(ledger, name)
    assert ledger.form(0, data_ended=True)[0] is not None
    ledger.publish(1)
    assert ledger.form(1)[0] is None
    plan, _ = ledger.form(1, data_ended=True)
    assert plan is not None and plan.groups == (2,)
    ledger.publish(2)
    assert ledger.form(2, data_ended=True) == (None, None) and ledger.counts().open == 0


def test_a_short_batch_waits_for_every_open_group() -> None:
    ledger = started(min_usable=1)
    first, _second = opened(ledger, 2)
    completed(ledger, first)
    assert ledger.form(0, data_ended=True)[0] is None


def test_versions_rise_and_publishing_again_gives_the_same() -> None:
    ledger = started()
    stepped(ledger)
    version, record = ledger.publish(1)
    assert (version.number, version.lineage, version.step, record) == (2, 0, 1, None)
    with pytest.raises(AssertionError, match="policy 3 published, the account is at 1"):
        ledger.publish(3)


# Rollback


def test_a_rollback_replays_the_same_plans_in_order_and_counts_nothing_twice() -> None:
    ledger = started()
    for _ in range(3):
        stepped(ledger)
    assert ledger.counts().trained == 6
    ledger.rollback(1)
    counts = ledger.counts()
    assert (counts.trained, counts.open, ledger.step, ledger.lineage, ledger.published) == (2, 4, 1, 1, None)
    assert ledger.room() == 0 and ledger.head_seq is None and ledger.trained_tokens_by_staleness() == {0: 8}
    version, _ = ledger.publish(1)
    assert (version.number, version.lineage, version.step) == (5, 1, 1)  # 1 to 4 were published before, and no number is used twice
    for step, groups in [(1, (2, 3)), (2, (4, 5))]:
        plan, _ = ledger.form(step)
        assert plan is not None and plan.groups == groups
        ledger.publish(step + 1)
    assert ledger.counts().trained == 6 and ledger.trained_tokens_by_staleness() == {0: 24}


def test_a_batch_in_training_is_replayed_too() -> None:
    ledger = started()
    for name in opened(ledger, 2):
        completed(ledger, name)
    before, _ = ledger.form(0)
    ledger.rollback(0)
    ledger.publish(0)
    assert ledger.form(0)[0] == before


def test_the_first_start_and_a_second_rollback_at_once_change_nothing() -> None:
    ledger = Ledger(Limits(groups_per_step=2, group_size=2, max_staleness=1))
    assert ledger.rollback(0) is None
    ledger.publish(0)
    assert ledger.rollback(0) is not None and ledger.rollback(0) is None


def test_what_a_cut_covered_cannot_be_gone_back_before() -> None:
    ledger = started()
    for _ in range(3):
        stepped(ledger)
    assert ("g00000000", 0) in set(ledger.retained())
    ledger.cover(2)
    assert {name for name, _ in ledger.retained()} == {"g00000004", "g00000005"}
    assert ledger.cover(2) is None and ledger.counts().trained == 6
    with pytest.raises(ValueError, match=r"step 1: it is at 3, .* restore a cut from 2 to 3"):
        ledger.rollback(1)
    with pytest.raises(ValueError, match="step 4"):
        ledger.rollback(4)
    assert ledger.submit("g00000000", 0, facts()).status == "unwanted"
    assert ledger.submit("g00000005", 0, facts()).status == "duplicate"


def test_a_group_lent_past_the_cut_is_not_lent_again_until_the_replay_has_come_that_far() -> None:
    ledger = started()
    stepped(ledger)
    opened(ledger, 1)  # first lent at step 1
    ledger.rollback(0)
    ledger.expire(10.0)
    ledger.publish(0)
    assert ledger.next_release() is None  # policy 0 would draw it, and it is trained at step 1 or later
    ledger.form(0)
    ledger.publish(1)
    released = ledger.next_release()
    assert released is not None and released.seq == 2


def test_a_lease_that_lived_through_a_rollback_is_dropped_when_it_drew_with_too_old_a_policy() -> None:
    ledger = started(max_staleness=0)
    stepped(ledger)
    kept, doomed = opened(ledger, 2)  # version 2, step 1
    completed(ledger, kept, version=2)  # drawn by a policy that the replay makes again: age 0
    ledger.rollback(0)
    ledger.publish(0)
    completed(ledger, doomed, version=3)  # version 3 is step 0 again: age 1 in the batch of step 1
    ledger.form(0)
    ledger.publish(1)
    plan, record = ledger.form(1)
    assert plan is None and record is not None and ledger.counts().dropped == {"rolled_back": 1}
    assert ledger.room() == 1 and ledger.account.drops_in_row == 0  # no fault of the prompts
    completed(ledger, opened(ledger, 1)[0], version=4)
    plan, _ = ledger.form(1)
    assert plan is not None and plan.groups == (2, 4)


def test_when_every_waiting_group_is_too_old_all_are_dropped_by_number_and_a_whole_fresh_batch_is_trained() -> None:
    # faults.md 37
    ledger = started(max_staleness=1)
    for _ in range(2):
        stepped(ledger)
    for name in opened(ledger, 4):
        completed(ledger, name, version=3)  # drawn at step 2
    ledger.rollback(0, replay=False)
    ledger.publish(0)
    plan, _ = ledger.form(0)
    assert plan is not None and plan.groups == (0, 1)  # of the shared history
    assert ledger.counts().dropped == {"rolled_back": 4}  # those of the dead step 2: (2 - 0) + (0 - 0) = 2 steps
    ledger.publish(1)
    plan, record = ledger.form(1)
    assert plan is None and record is not None and record["groups"] == [2, 3]  # of the dead step 1: (1 - 0) + (1 - 0) = 2 steps: all that waited
    assert ledger.counts().dropped == {"rolled_back": 6} and ledger.counts().waiting == 0 and not ledger.exhausted
    for name in opened(ledger, 2):
        completed(ledger, name, version=5)
    plan, _ = ledger.form(1)
    assert plan is not None and plan.groups == (8, 9) and plan.tokens == ((0, 8),)


def test_a_prompt_that_takes_five_steps_is_trained_and_not_discarded_for_ever() -> None:
    # faults.md 38: 8 prompts over and over, every sample of prompt 3 takes 5 learner steps, S = 2, 40 steps
    ledger = started(groups_per_step=2, max_staleness=2, window=3)
    due: dict[str, int] = {}  # group to the step at which its samples are there
    trained: list[int] = []
    steps = waits = 0
    while steps < 40:
        while ledger.room():
            (name,) = opened(ledger)
            due[name] = steps + waits + (5 if seq_of(name) % 8 == 3 else 0)  # type: ignore[operator]
        published = ledger.published
        assert published is not None
        for name in [name for name, at in due.items() if at <= steps + waits]:
            group = ledger.group(name)
            assert group is not None
            completed(ledger, name, version=group.first_version)  # all of it by the policy of its lease
            del due[name]
        plan, _ = ledger.form(ledger.step)
        if plan is None:
            waits += 1  # the learner waits for the slow one, as a synchronous one would, but only up to the bound
            continue
        trained += [seq % 8 for seq in plan.groups]
        steps += 1
        ledger.publish(ledger.step + 1)
    assert ledger.counts().dropped == {}
    # 80 groups of 8 prompts in turn: each ten times, but for those at the end that were overtaken within the window.
    assert all(abs(trained.count(prompt) - 10) <= 1 for prompt in range(8))


def test_plans_that_are_not_replayed_give_their_groups_back_and_count_the_way_back() -> None:
    ledger = started(max_staleness=2)
    for _ in range(3):
        stepped(ledger)
    ledger.rollback(1, replay=False)  # step 3 to 1
    assert ledger.counts().trained == 2 and ledger.counts().waiting == 4
    ledger.publish(1)
    plan, _ = ledger.form(1)
    assert plan is not None and plan.groups == (2, 3)  # drawn at step 1, of the shared history: age 0
    assert plan.tokens == ((0, 8),)
    ledger.publish(2)
    plan, _ = ledger.form(2)
    assert plan is not None and plan.groups == (4, 5)  # drawn at the dead step 2: (2 - 1) + (2 - 1)
    assert plan.tokens == ((2, 8),)


def test_a_state_of_another_schema_or_group_size_is_refused() -> None:
    ledger = started()
    with pytest.raises(ValueError, match="schema 7, this program reads 1"):
        Ledger.from_state(ledger.limits, {**ledger.state(), "schema": 7})
    with pytest.raises(ValueError, match="group_size=3, but the saved account has groups of 2"):
        Ledger.from_state(Limits(groups_per_step=2, group_size=3, max_staleness=1), ledger.state())
    with pytest.raises(ValueError, match="unknown type 'novel'"):
        ledger.apply({"type": "novel"})


def test_a_batch_past_the_bound_raises() -> None:
    ledger = started(max_staleness=1)
    for name in opened(ledger, 2):
        completed(ledger, name)
    ledger.account.step = 2  # a defect: two steps closed beside these groups
    with pytest.raises(StalenessBroken, match="g00000000 is 2 steps old in the batch of step 2, more than max_staleness=1"):
        ledger.form(2)
