"""`python -m bertie`, and `python -P …/bertie/__main__.py`, which runs this copy of the package wherever it is."""

import sys

if not __package__:  # run by its path
    from importlib.util import module_from_spec, spec_from_file_location
    from os.path import dirname, join

    spec = spec_from_file_location("bertie", join(dirname(__file__), "__init__.py"))
    assert spec is not None
    assert spec.loader is not None
    sys.modules["bertie"] = module_from_spec(spec)
    spec.loader.exec_module(sys.modules["bertie"])

from bertie.cli import main

sys.exit(main())
