"""Which alarms fire: those whose condition has held for long enough, for each series by itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from learner.alarm_config import AlarmConfig
from learner.watch.alarms import Alarm, series_labels
from learner.watch.expressions import Expression
from learner.watch.window import Labels, Window


@dataclass(frozen=True, kw_only=True, slots=True)
class Fire:
    """One alarm that fires for one series. Example: `Fire(alarm=ALARMS["HeadraceReplicaStalled"], labels={"replica": "a"}, value=75.0, since_s=12.0)`"""

    alarm: Alarm
    labels: dict[str, str]
    value: float  # newest
    since_s: float  # when its condition began to hold, on the window's clock

    @property
    def words(self) -> str:
        return self.alarm.words(self.labels, self.value)


class Alarms:
    """Example: `alarms = Alarms(ALARMS.values(), config); window = alarms.window(); window.add(...); alarms.look(window)`"""

    def __init__(self, alarms: Iterable[Alarm], config: AlarmConfig) -> None:
        self._config = config
        self._conditions: dict[str, tuple[Alarm, Expression]] = {alarm.name: (alarm, alarm.condition(config)) for alarm in alarms}
        self._since_s: dict[tuple[str, Labels], float] = {}
        self.firing: dict[tuple[str, Labels], Fire] = {}

    def horizons_s(self) -> dict[str, float]:
        """How far back each figure is asked for, with a reading to spare."""
        found: dict[str, float] = {}
        for _, condition in self._conditions.values():
            for name, over_s in condition.horizons_s():
                found[name] = max(found.get(name, 0.0), over_s + self._config.every_s)
        return found

    def look(self, window: Window) -> tuple[list[Fire], list[Fire]]:
        """(those that began to fire with the newest reading, those that ended)."""
        holding = {(name, key): value for name, (_, condition) in self._conditions.items() for key, value in condition.value(window).items()}
        self._since_s = {key: self._since_s.get(key, window.now_s) for key in holding}
        before, self.firing = self.firing, {}
        for (name, key), value in holding.items():
            alarm, since_s = self._conditions[name][0], self._since_s[name, key]
            if window.now_s - since_s >= alarm.hold_s * self._config.patience:
                self.firing[name, key] = Fire(alarm=alarm, labels=series_labels(key), value=value, since_s=since_s)
        began = [fire for key, fire in self.firing.items() if key not in before]
        return began, [fire for key, fire in before.items() if key not in self.firing]
