"""Tables as the output of `transform`, as configured by scikit-learn's `set_output`."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any, Literal, TypeAlias

from numpy.typing import NDArray

from bertie.errors import InputError, MissingPackageError
from bertie.pipeline.inputs import check_list

TransformOutput: TypeAlias = Literal["default", "pandas", "polars"]


def check_output(transform: str | None) -> None:
    """Refuse unknown kinds of output."""
    if transform not in (None, "default", "pandas", "polars"):
        raise InputError(f"transform={transform!r} must be 'default', 'pandas', 'polars' or None")


def output_kind(transform: str | None) -> str:
    """The kind of output: as set by `set_output`, else by scikit-learn's global configuration, if imported."""
    sklearn = sys.modules.get("sklearn")
    return transform or ("default" if sklearn is None else str(sklearn.get_config()["transform_output"]))


def as_table(rows: NDArray[Any], columns: NDArray[Any], kind: str, X: Any) -> Any:
    """(N, D) an array as a table with named columns; in pandas, with the index of the input."""
    if kind == "default":
        return rows
    try:
        package = import_module(kind)
    except ModuleNotFoundError:
        raise MissingPackageError(f"set_output(transform={kind!r}) needs {kind}: pip install {kind}") from None
    if kind == "polars":
        return package.DataFrame(rows, schema=list(columns), orient="row")
    index = X.index if isinstance(X, package.DataFrame | package.Series) else None
    return package.DataFrame(rows, columns=columns, index=index, copy=False)


def single_column(X: Any) -> Any:
    """The texts of a table or array with one column; other inputs are returned unchanged."""
    if hasattr(X, "columns") or getattr(X, "ndim", 1) == 2:
        names = list(X.columns) if hasattr(X, "columns") else list(range(X.shape[1]))
        if len(names) != 1:
            raise InputError(f"X has {len(names)} columns, but transform takes a single column of texts")
        return X[names[0]] if hasattr(X, "columns") else X[:, 0]
    return check_list(X, "transform")
