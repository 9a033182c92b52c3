"""The OpenAI-compatible endpoint: agents written for it are sampled, recorded and trained unchanged (docs/agents.md)."""
