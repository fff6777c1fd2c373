"""The names of `tests.kit.raw_peer`, for those who import them from here."""

from tests.kit.raw_peer import *  # noqa: F403
from tests.kit.waiting import soon, until  # noqa: F401
