"""The kinds of training data of bertie-small, one module per kind; prepare.py writes all of them."""
