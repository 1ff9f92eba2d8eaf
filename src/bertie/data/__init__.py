"""Tables in and out: rows of text files in bounded memory, results into files that are whole or not there."""
