"""Scores that were computed before: `key` names them by content, `memory` and `shared` keep them, `flights` computes equal ones once."""
