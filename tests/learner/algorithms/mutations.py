"""Faults to plant in the learning mathematics, one at a time, and a program that says which tests caught which.

    python tests/learner/algorithms/mutations.py      prints a table; exit code 0 only if every fault was caught

Each fault is one replacement in a copy of the package; the module's own tests run against the copy and must fail. Torch is
imported once and each trial is a forked child.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
TESTS = Path(__file__).resolve().parent


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Example: Fault(kind="ddof", module="advantages", old="- ddof", new="- 1")"""

    kind: str
    module: str  # of learner/algorithms
    old: str  # occurs exactly once
    new: str
    test: str = ""  # test file; empty: test_<module>.py


FAULTS = (
    Fault(kind="ddof", module="advantages", old="(values.numel() - ddof)", new="(values.numel() - 1)"),
    Fault(kind="floor in the deviation", module="advantages", old="(values.numel() - ddof)).sqrt()", new="(values.numel() - ddof)).sqrt().clamp(min=1e-4)"),
    Fault(kind="mean instead of spread", module="rewards", old="values.max() - values.min() >= SPREAD_TOLERANCE", new="values.mean() != 0", test="test_advantages.py"),
    Fault(kind="denominator", module="leave_one_out", old="/ (values.numel() - 1)", new="/ values.numel()"),
    Fault(kind="mask: samples weigh alike", module="batch_advantages", old="torch.cat([group.num_tokens for group in groups])", new="torch.ones(sum(g.rewards.numel() for g in groups))"),
    Fault(kind="shift: flat group inherits the batch's mean", module="batch_advantages", old="part if has_signal(group.rewards) else torch.zeros_like(part)", new="part"),
    Fault(kind="weights dropped", module="length_weighted", old="(lengths * values).sum() / lengths.sum()", new="values.mean()"),
    Fault(kind="denominator", module="gpg", old="for group in groups if has_signal(group.rewards))", new="for group in groups)"),
    Fault(kind="normalised together", module="several_rewards", old="normalize=True", new="normalize=False"),
    Fault(kind="sign", module="pass_at_k", old="(1 - mean - subsets_of_wrong)", new="(mean - 1 - subsets_of_wrong)"),
    Fault(kind="mask: a sample's last token looks into the next sample", module="gae", old="(sequence[1:] == sequence[:-1])", new="(sequence[1:] >= sequence[:-1])"),
    Fault(kind="shift: value of the same step", module="gae", old="gamma * next_value", new="gamma * float(values[t])"),
    Fault(kind="shift: discounted by tokens", module="returns", old="token_returns(turn_rewards, gamma=gamma)[turn]", new="token_returns(turn_rewards[turn], gamma=gamma)"),
    Fault(kind="sign of the ratio", module="policy_loss", old="ratio_of(logprob - old)", new="ratio_of(old - logprob)"),
    Fault(kind="minimum and maximum swapped", module="policy_loss", old="torch.maximum(plain, clipped)", new="torch.minimum(plain, clipped)"),
    Fault(kind="dual clip by the signed advantage", module="policy_loss", old="dual_clip * advantage.abs()", new="dual_clip * advantage"),
    Fault(kind="clamp after exp", module="ratio", old="return bounded(log_ratio).exp()", new="return log_ratio.exp().clamp(max=4.9e8)", test="test_policy_loss.py"),
    Fault(kind="sum instead of mean", module="sequence_ratio", old="ratio_of(segment_mean(logprob - old", new="ratio_of(segment_mean(2 * (logprob - old)"),
    Fault(kind="clip side", module="sequence_ratio", old="log_ratio.clamp(max=clip_log), log_ratio.clamp(min=-clip_log)", new="log_ratio.clamp(min=-clip_log), log_ratio.clamp(max=clip_log)"),
    Fault(kind="detach forgotten", module="cispo", old="ratio_of(logprob.detach() - old)", new="ratio_of(logprob - old)"),
    Fault(kind="tau not divided out", module="sapo", old="-4 / tau * gate", new="-4 * gate"),
    Fault(kind="mask: both directions", module="divergence_loss", old="beyond & (advantage > 0) & (ratio > 1)", new="beyond & (advantage > 0)"),
    Fault(kind="KL the other way round", module="divergence_loss", old="bounded(old - logprob)", new="bounded(logprob - old)"),
    Fault(kind="not centred", module="covariance", old="(advantage - advantage_mean)", new="advantage"),
    Fault(kind="smaller of both", module="value_loss", old="torch.maximum(plain, clipped)", new="torch.minimum(plain, clipped)"),
    Fault(kind="sign", module="entropy", old="return log_total - (", new="return log_total + ("),
    Fault(kind="sign", module="distillation", old="bounded(teacher - logprob)", new="bounded(logprob - teacher)"),
    Fault(kind="detach forgotten", module="correction", old="detached = log_ratio.detach()", new="detached = log_ratio"),
    Fault(kind="mask turned into clip", module="correction", old="torch.where(inside, ratio if", new="torch.where(inside | True, ratio if"),
    Fault(kind="level: mean where sum is meant", module="correction", old='segment_sum if level == "sequence"', new='segment_mean if level == "sequence"'),
    Fault(kind="off by one step", module="proximal", old="steps / (steps + 1)", new="steps / (steps + 2)"),
    Fault(kind="denominator: all tokens", module="second_moment", old="        left -= 1\n", new=""),
    Fault(kind="gradient through the weight", module="score_centering", old="fixed = weight.detach()", new="fixed = weight * log_policy.exp()"),
    Fault(kind="sign of d", module="kl", old="(-small).exp() - 1 + small", new="small.exp() - 1 - small"),
    Fault(kind="detach forgotten", module="kl", old="value.detach() + slope - slope.detach()", new="value + slope - slope.detach()"),
    Fault(kind="shift: to go without itself", module="segments", old="- (through - before_sample) + values", new="- (through - before_sample)"),
    Fault(kind="denominator: rows instead of the batch", module="aggregation", old="return token_loss.sum() / num_tokens", new="return token_loss.mean() if token_loss.numel() else token_loss.sum()"),
    Fault(kind="denominator: length", module="aggregation", old="(num_sequences * norm_tokens)", new="token_loss.numel()"),
    Fault(kind="ess without the count", module="mismatch", old="(ratio.numel() * ratio.square().sum())", new="ratio.square().sum()"),
    Fault(kind="limit", module="overlong", old=".clamp(0, 1)", new=".clamp(0, 2)", test="test_overlong.py"),
)  # fmt: skip


def caught(fault: Fault) -> bool:
    """Whether the module's tests fail on a copy of the package with the fault in it."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "learner"
        shutil.copytree(ROOT / "learner", copy, ignore=shutil.ignore_patterns("__pycache__"))
        file = copy / "algorithms" / f"{fault.module}.py"
        source = file.read_text()
        if source.count(fault.old) != 1:
            raise ValueError(f"{fault.module}: {fault.old!r} occurs {source.count(fault.old)} times, it must be once; correct the fault's text")
        file.write_text(source.replace(fault.old, fault.new))
        return failed(Path(folder), fault.test or f"test_{fault.module}.py")


def failed(package: Path, test: str) -> bool:
    """Whether a test file fails with `package` in front of the import path."""
    child = os.fork()
    if child == 0:
        import pytest

        with contextlib.suppress(KeyboardInterrupt), open(os.devnull, "w") as quiet, contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet):
            sys.path.insert(0, str(package))
            code = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), "-c", str(ROOT / "pyproject.toml"), str(TESTS / test)])
            import learner.algorithms

            came_from = Path(learner.algorithms.__file__ or "").is_relative_to(package)
            os._exit(int(code) if came_from else 99)
        os._exit(98)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, 1):
        raise RuntimeError(f"{test}: the trial itself failed with code {code} (99: the copy was not what was imported)")
    return code == 1


def main() -> int:
    import hypothesis  # noqa: F401  what every trial needs is imported once, before the first fork
    import torch  # noqa: F401

    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "learner", Path(folder) / "learner", ignore=shutil.ignore_patterns("__pycache__"))
        broken = [test for test in sorted({f.test or f"test_{f.module}.py" for f in FAULTS}) if failed(Path(folder), test)]
    if broken:
        print(f"without any fault these fail already: {', '.join(broken)}")
        return 1
    missed = 0
    for fault in FAULTS:
        found = caught(fault)
        missed += not found
        print(f"{'caught' if found else 'MISSED':6}  {fault.module:18} {fault.kind}", flush=True)
    print(f"{len(FAULTS) - missed} of {len(FAULTS)} caught")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
