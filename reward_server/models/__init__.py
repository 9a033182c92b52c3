"""Reward models: one front in the scorer's process, a process for each device. Only those import torch."""
