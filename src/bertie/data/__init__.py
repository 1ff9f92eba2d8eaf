"""Tables in and out: stream rows from files in bounded memory, and write results atomically and resumably."""
