"""Which blocks of which tier of memory hold which cached prefixes. Pure."""
