"""Tables in and out: stream rows in bounded memory, write results atomically, resume."""
