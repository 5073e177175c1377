"""Start of each Python process of a run by `tests.support.desktops`, which names this directory."""

from tests.support.desktops import take_away_at_import

take_away_at_import()
