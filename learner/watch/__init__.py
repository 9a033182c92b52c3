"""Alarms of a run, evaluated by the gateway itself, and the diagnosis that an alarm begins."""
