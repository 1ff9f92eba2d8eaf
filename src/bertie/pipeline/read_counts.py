"""The fields of every result about how much of its text was read, and in which language; see `bertie.tasks.results`."""

READ_COUNTS = ("tokens_total", "tokens_read", "windows", "tokens_unknown", "tokens_non_english")
