"""Property tests here have no deadline for one example: on a busy machine the first call of a kernel alone may take longer than any."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("algorithms", deadline=None, max_examples=50)
settings.load_profile("algorithms")
