"""A text game on reasoning-gym's `tower_of_hanoi`: one move a turn, and the pegs are shown after each (package reasoning-gym, Apache-2.0).

    environment  Move 3 disks from peg 1 to peg 3 ... 1: 3 2 1 | 2: | 3:
    policy       1>3
    environment  1: 3 2 | 2: | 3: 1

The instance and the judgement of the moves are the package's own (Stojanovski et al. 2025, "Reasoning Gym").
"""

from __future__ import annotations

import re
from typing import Any

from rollout_server.environments.interface import Action, Step, Task

_MOVE = re.compile(r"(\d+)\s*(?:>|->|to)\s*(\d+)")


class TowerOfHanoi:
    """num_disks: of each game, or the record's field of that name. max_moves: then the game is over; None: 3 times the fewest.

    illegal_reward: for a move that the rules forbid or that is none.
    """

    def __init__(self, *, num_disks: int = 3, max_moves: int | None = None, illegal_reward: float = 0.0) -> None:
        self._num_disks, self._max_moves, self._illegal_reward = num_disks, max_moves, illegal_reward
        self._entry: dict[str, Any] = {}
        self._game: Any = None
        self._pegs: dict[int, list[int]] = {}
        self._moves: list[str] = []

    def reset(self, task: Task) -> str:
        from reasoning_gym import create_dataset  # takes a second

        disks = int(task.fields.get("num_disks", self._num_disks))
        self._game = create_dataset("tower_of_hanoi", min_disks=disks, max_disks=disks, min_pegs=3, max_pegs=3, size=1, seed=task.seed % 2**31)
        self._entry = self._game[0]
        about = self._entry["metadata"]
        self._pegs = {peg: [] for peg in range(1, about["num_pegs"] + 1)}
        self._pegs[about["start_peg"]] = list(range(disks, 0, -1))
        self._left = self._max_moves or 3 * (2**disks - 1)
        rules = f"Move {disks} disks from peg {about['start_peg']} to peg {about['target_peg']}, one disk a turn, never a larger one upon a smaller one. Answer with a move such as 1>3."
        return f"{rules}\n{self.shown()}"

    def shown(self) -> str:
        """The pegs, largest disk first."""
        return " | ".join(f"{peg}: {' '.join(map(str, disks))}".rstrip() for peg, disks in self._pegs.items())

    def step(self, action: Action) -> Step:
        self._left -= 1
        why_not = self._move(action.text)
        if self._solved() or self._left <= 0:
            return Step(reward=self._judged() + (self._illegal_reward if why_not else 0.0), done=True, parts={"solved": float(self._solved())})
        return Step(observation=f"{why_not}{self.shown()}", reward=self._illegal_reward or None if why_not else None)

    def _move(self, said: str) -> str:
        """Makes the move; empty, or why it cannot be made."""
        found = _MOVE.search(said)
        if found is None:
            return "No move was seen. "
        start, end = int(found[1]), int(found[2])
        if start not in self._pegs or end not in self._pegs or start == end or not self._pegs[start]:
            return f"{start}>{end} is no move. "
        disk = self._pegs[start][-1]
        if self._pegs[end] and self._pegs[end][-1] < disk:
            return f"Disk {disk} is larger than what lies on peg {end}. "
        self._pegs[end].append(self._pegs[start].pop())
        self._moves.append(f"Move disk {disk} from Peg {start} to Peg {end}")
        return ""

    def _solved(self) -> bool:
        about = self._entry["metadata"]
        return len(self._pegs[about["target_peg"]]) == int(about["num_disks"])

    def _judged(self) -> float:
        return float(self._game.score_answer("\n".join(self._moves), self._entry)) if self._moves else 0.0
