"""Model folders and hub ids, read and written: configs, family tables, weights, sentence-transformers folders."""
